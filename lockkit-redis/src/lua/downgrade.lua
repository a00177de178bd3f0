-- Makes the owner's exclusive hold a shared one, and lets in those at the head of the queue who may share it. A hold that is gone
-- is never made anew. Idempotent: a shared hold of the owner is prolonged. It is also the renewal of such a hold, since a server
-- that took over from another may not know of the downgrade. Returns as a renewal does.
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
local asked = call('HGET', REVOKED, me)
if asked and tonumber(asked) == token_of(record) then
  -- Only the master can tell.
  check_writable()
  return 2
end
-- First: a server without memory refuses SET and ZADD, but not within a script that has begun to write.
call('PEXPIRE', LOCK, ttl)
if is_exclusive then
  -- Of an earlier group, they count no more.
  drop_expired_members()
  -- A try may have been granted beside the owner's place in the queue.
  call('ZREM', QUEUE, me)
  value = 'lockkit#shared'
end
call('ZADD', HOLDERS, now + ttl, me)
call('HSET', ENTRIES, me, 's ' .. ttl .. ' ' .. record)
-- This updates the key as well.
grant_from_queue()
tell_if_shorter(ttl, left)
return 1
