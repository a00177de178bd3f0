-- Prolongs the owner's lease. Returns 1, or 0 if the hold is gone. A hold that is gone is never made anew.
-- ARGV: 1 the value, known up to the owner at least   2 ttl in ms
local me = string.sub(ARGV[1], 9, 40)
drop_expired_holders()
local is_exclusive = exclusive_holder() == me
if not is_exclusive and not is_member(me) then
  check_writable()
  grant_from_queue()
  return 0
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
return 1
