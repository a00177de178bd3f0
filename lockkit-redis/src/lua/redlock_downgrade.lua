-- Makes the owner's exclusive hold a shared one, and wakes the readers that came before the first writer. Idempotent. Returns as a
-- renewal does.
-- ARGV: 1 the marker with which it has a vote   2 the value   3 ttl in ms   4 the last token
local me = owner_of(ARGV[2])
drop_ended()
local mine = holder() == me and value or share_of(me)
if was_asked(mine) then return 4 end
-- The key of an earlier round may have come back with old data, after votes for others.
if (not mine or mine ~= ARGV[2]) and not has_vote(ARGV[1]) then return 3 end
if not mine then return (not value or kept_for() or is_shared()) and 0 or 2 end
-- A server out of memory refuses what follows, unless the script has written before.
call('PEXPIRE', LOCK, ARGV[3])
share(me, ARGV[2], ARGV[3])
raise(ARGV[4], ARGV[4], call('GET', FENCE))
keep_counter()
wake_readers()
return 1
