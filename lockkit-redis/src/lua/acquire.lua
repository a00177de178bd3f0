-- Grants the lock, or puts the owner in the queue. Idempotent: a hold of the same owner is returned, and not made anew.
-- Returns {first token, how many}; or {position in the queue or -1, ms left of the lease or -1, 1 if a foreign client holds
-- it}; or a text: how many permits the semaphore has.
local mode, ttl, tokens = ARGV[4], ARGV[3], tonumber(ARGV[5])
local is_try = ARGV[6] == 'try'
drop_expired_holders()

-- The reply to an earlier request was lost, or the lock was handed off. PEXPIRE comes first, here and below: a server
-- without memory refuses SET and ZADD, but not within a script that has begun to write.
if exclusive_holder() == me then
  local reserved, first = string.match(value, '^%S+ (%d+) (%d+) ')
  call('PEXPIRE', LOCK, ttl + (has_waiters() and GRACE or 0))
  return { tonumber(first), tonumber(reserved) }
end

if is_member(me) then
  local _, _, mine = entry_of(me)
  call('PEXPIRE', LOCK, ttl)
  call('ZADD', HOLDERS, now + ttl, me)
  update_lock_key()
  return { token_of(mine), tokens }
end

local permits = value and string.match(value, '^lockkit#permits (%d+)$')
if permits and permits ~= string.sub(mode, 2) then return permits end

local blocked = call('EXISTS', QUEUE) == 1
if blocked and is_try then
  check_writable()
  local _
  _, blocked = grant_from_queue()
  -- Its own place goes with the grant.
  if not blocked and fits(mode) then call('ZREM', QUEUE, me) end
end
if not blocked and fits(mode) then
  local first = grant(me, mode, ttl, ttl, record)
  update_lock_key()
  return { first, tokens }
end
if is_try then
  check_writable()
  return { -1, lease_left(), is_foreign() and 1 or 0 }
end

-- Behind the last, also when the clock went back.
local last = call('ZREVRANGE', QUEUE, 0, 0, 'WITHSCORES')[2] or 0
if call('ZADD', QUEUE, 'NX', string.format('%d', math.max(last + 1, micros)), me) == 1 then
  call('HSET', ENTRIES, me, mode .. ' ' .. ttl .. ' ' .. record)
end
extend(QUEUE, IDLE)
extend(ENTRIES, IDLE)
local mine = grant_from_queue(me)
if mine then return { mine, tokens } end
return { call('ZRANK', QUEUE, me), lease_left(), is_foreign() and 1 or 0 }
