-- Returns 1: held; 0: not held, and to be had; 2: not held, and not to be had, since another holds or this hold was ended here; 3: not
-- held, and this process has no vote; 4: held, and its holder was asked to give it up. It does not set a missing key anew: only a
-- majority can tell whether that is allowed.
local me = owner_of(ARGV[2])
drop_ended()
-- An exclusive hold is repaired if it has become a shared one at a majority. A shared one is not, since it does not exclude the same
-- others.
local was_exclusive = holder() == me
local mine = was_exclusive and value or (ARGV[6] == 's' and share_of(me))
if was_asked(mine) then return 4 end
if mine then
  -- The key of an earlier round may have come back with old data, after votes for others.
  if mine ~= ARGV[2] and not has_vote(ARGV[1]) then return 3 end
  -- The hold may have tokens that no majority confirmed. It gets those that count.
  -- A server out of memory refuses what follows, unless the script has written before.
  call('PEXPIRE', LOCK, ARGV[3])
  if ARGV[6] == 'x' then
    call('SET', LOCK, ARGV[2], 'PX', ARGV[3])
  else
    share(me, ARGV[2], ARGV[3])
    if was_exclusive then wake_readers() end
  end
  -- The counter may stand between the first and the last.
  raise(ARGV[5], ARGV[5], call('GET', FENCE))
  keep_counter()
  return 1
end
if not has_vote(ARGV[1]) then return 3 end
local was_ended = call('HGET', REVOKED, me) == ARGV[4]
local to_be_had = not was_ended and (not value or kept_for() or (is_shared() and ARGV[6] == 's'))
return to_be_had and 0 or 2
