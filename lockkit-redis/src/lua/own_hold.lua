-- Finds the owner's hold, for a script that prolongs it. Returns 0 if it is gone, or 2 if its holder was asked to give it up. A hold
-- that is gone is never made anew.
-- ARGV: 1 the value, with the token that is in use   2 ttl in ms
local me, ttl, record = string.sub(ARGV[1], 9, 40), tonumber(ARGV[2]), string.sub(ARGV[1], 9)
drop_expired_holders()
local is_exclusive = exclusive_holder() == me
local member_until = not is_exclusive and is_member(me)
if not is_exclusive and not member_until then
  check_writable()
  grant_from_queue()
  return 0
end
local left = is_exclusive and lease_left() or member_until - now
-- A hold that was passed on within its client since then has a later token.
local asked = call('HGET', REVOKED, me)
if asked and tonumber(asked) == token_of(record) then
  -- Only the master can tell.
  check_writable()
  return 2
end
-- First: a server without memory refuses SET and ZADD, but not within a script that has begun to write.
call('PEXPIRE', LOCK, ttl)
