-- Returns 1: held; 0: not held, but to be had; 2: somebody else has it; 3: not held, and this process has no vote. What is
-- gone is not made anew here: only a majority can tell whether it may be.
local me = owner_of(ARGV[2])
drop_ended()
-- One that it set to hold otherwise, in a round that was lost, excludes others than this one.
local mine
if ARGV[6] == 'x' then
  mine = holder() == me and value
else
  mine = is_shared() and call('ZSCORE', HOLDERS, me) and call('HGET', ABOUT, me)
end
if mine then
  -- Of an earlier round: it may have come back with old data, after others had voted here.
  if mine ~= ARGV[2] and not has_vote(ARGV[1]) then return 3 end
  -- It was held with tokens that no majority had. From now on it has those that count.
  if is_shared() then
    share(me, ARGV[2], ARGV[3])
  else
    call('SET', LOCK, ARGV[2], 'PX', ARGV[3])
  end
  -- The counter may stand between the first and the last.
  raise(ARGV[5], ARGV[5], call('GET', FENCE))
  keep_counter()
  return 1
end
if not has_vote(ARGV[1]) then return 3 end
local to_be_had = not value or kept_for() or (is_shared() and ARGV[6] == 's')
return to_be_had and 0 or 2
