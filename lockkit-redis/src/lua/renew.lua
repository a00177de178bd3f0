-- Prolongs the owner's lease. Returns 1; 0 if the hold is gone; or 2 if its holder was asked to give it up. A hold that
-- is gone is never made anew.
-- ARGV: 1 the value, known up to the owner at least   2 ttl in ms
local me = string.sub(ARGV[1], 9, 40)
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
if asked and tonumber(asked) == token_of(ARGV[1]) then
  -- Only the master can tell.
  check_writable()
  return 2
end
-- First: a server without memory refuses SET and ZADD, but not within a script that has begun to write.
call('PEXPIRE', LOCK, ARGV[2])
if is_exclusive then
  -- Publishes the token that is in use now. It only rises: a request on another connection may come late.
  if token_of(value) < token_of(ARGV[1]) then value = ARGV[1] end
  lease = tonumber(ARGV[2])
else
  call('ZADD', HOLDERS, now + ARGV[2], me)
end
update_lock_key()
tell_if_shorter(tonumber(ARGV[2]), left)
return 1
