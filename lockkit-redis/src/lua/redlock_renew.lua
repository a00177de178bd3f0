-- Returns 1: held; 0: not held, but to be had; 2: somebody else has it, or this process has no vote. What is gone is not
-- made anew here: only a majority can tell whether it may be.
local me = owner_of(ARGV[2])
drop_ended()
if holder() == me then
  -- It was held with tokens that no majority had. From now on it has those that count.
  call('SET', LOCK, ARGV[2], 'PX', ARGV[3])
  raise(ARGV[4], ARGV[5])
  return 1
end
if is_shared() and call('ZSCORE', HOLDERS, me) then
  share(me, ARGV[2], ARGV[3])
  raise(ARGV[4], ARGV[5])
  return 1
end
local to_be_had = not value or (is_shared() and ARGV[6] == 's')
return to_be_had and has_vote(ARGV[1]) and 0 or 2
