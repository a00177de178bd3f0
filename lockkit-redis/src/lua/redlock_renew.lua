-- Returns 1: held; 0: not held, and free; 2: another holder; 3: not held, and this process has no vote. It does not set a
-- missing key anew: only a majority can tell whether that is allowed.
local me = owner_of(ARGV[2])
drop_ended()
-- A hold in the other mode, of a lost round, does not exclude the same others.
local mine
if ARGV[6] == 'x' then
  mine = holder() == me and value
else
  mine = is_shared() and call('ZSCORE', HOLDERS, me) and call('HGET', ABOUT, me)
end
if mine then
  -- The key of an earlier round may have come back with old data, after votes for others.
  if mine ~= ARGV[2] and not has_vote(ARGV[1]) then return 3 end
  -- The hold may have tokens that no majority confirmed. It gets those that count.
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
