-- Makes another owner that of the hold with this token, and prolongs its lease. Returns 1; 0 if there is no such hold; or 2 if its
-- holder was asked to give it up. Idempotent: a hold that is the new owner's already is prolonged.
-- ARGV: 1 the new value   2 the owner before   3 ttl in ms   4 mode: x, s, p<permits>
local me, before = string.sub(ARGV[1], 9, 40), ARGV[2]
local record = string.sub(ARGV[1], 9)
local token = token_of(record)
local owner, theirs, left
drop_expired_holders()
if ARGV[4] == 'x' then
  owner = exclusive_holder()
  if owner then
    theirs, left = string.sub(value, 9), lease_left()
  end
elseif value == group_of(ARGV[4]) then
  owner = is_member(me) and me or before
  left = is_member(owner)
  if left then
    local _
    _, _, theirs = entry_of(owner)
    left = left - now
  end
end
if not theirs or (owner ~= me and owner ~= before) or token_of(theirs) ~= token then
  -- A server that was demoted refuses to write. It must not say that the hold is over.
  check_writable()
  grant_from_queue()
  return 0
end
local asked = call('HGET', REVOKED, owner)
if asked and tonumber(asked) == token then
  check_writable()
  return 2
end
-- A request that was given up may come late, after the new owner has asked for a longer lease.
local ms = math.max(tonumber(ARGV[3]), left)
-- First: a server without memory refuses SET and ZADD, but not within a script that has begun to write.
call('PEXPIRE', LOCK, ms)
if ARGV[4] == 'x' then
  value = 'lockkit:' .. record
  lease = ms
else
  call('ZADD', HOLDERS, now + ms, me)
  call('HSET', ENTRIES, me, ARGV[4] .. ' ' .. ARGV[3] .. ' ' .. record)
  if owner ~= me then
    call('ZREM', HOLDERS, owner)
    call('HDEL', ENTRIES, owner)
  end
end
update_lock_key()
return 1
