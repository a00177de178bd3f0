-- Returns 1, or 0 if it is not held any more. What is gone is never made anew.
-- ARGV: 1 the value, known up to the owner at least   2 ttl in ms
local me = string.sub(ARGV[1], 9, 40)
drop_ended()
local alone = holder() == me
if not alone and not shares(me) then
  may_write()
  serve()
  return 0
end
-- A server without memory refuses to set and to add, but not to a script that has begun to write.
call('PEXPIRE', LOCK, ARGV[2])
if not alone then
  call('ZADD', HOLDERS, now + ARGV[2], me)
else
  -- With the token in use from now on, which only rises: a request on another connection may be a late one.
  if token_of(value) < token_of(ARGV[1]) then value = ARGV[1] end
  lease = tonumber(ARGV[2])
end
settle()
return 1
