-- Grants the lock, or puts the owner in the queue. Idempotent: a hold of the same owner is returned, and not made anew.
-- Returns {first token, how many}; or {position in the queue or -1, ms left of the lease or -1, 1 if a foreign client holds
-- it}; or a text: how many permits the semaphore has.
local mode, ttl, tokens = ARGV[4], ARGV[3], tonumber(ARGV[5])
local is_try = ARGV[6] == 'try'
local me = string.sub(ARGV[1], 9, 40)
local record = me .. ' ' .. tokens .. string.match(ARGV[1], '^%S+ %d+(.*)$')
drop_expired_holders()

local function last_arrival() return call('ZREVRANGE', QUEUE, 0, 0, 'WITHSCORES')[2] end

-- Puts the owner behind the last, also when the clock went back. Returns whether it was not in the queue.
local function enqueue(last)
  local is_new = call('ZADD', QUEUE, 'NX', string.format('%d', math.max((last or 0) + 1, micros)), me) == 1
  if is_new then call('HSET', ENTRIES, me, mode .. ' ' .. ttl .. ' ' .. record) end
  return is_new
end

-- The reply to an earlier request was lost, or the lock was handed off. PEXPIRE comes first, here and below: a server
-- without memory refuses SET and ZADD, but not within a script that has begun to write.
if exclusive_holder() == me then
  local reserved, first = string.match(value, '^%S+ (%d+) (%d+) ')
  call('PEXPIRE', LOCK, ttl + (has_waiters() and GRACE or 0))
  return { tonumber(first), tonumber(reserved) }
end

-- A newcomer to a lock that is held exclusively only joins the queue. A request from the queue goes on, to find out who
-- before it has died.
if exclusive_holder() and not is_try then
  -- The owner may be among shared holders that no longer count. Dropping them later would drop its entry as a waiter.
  if mode ~= 'x' then drop_expired_members() end
  local last = last_arrival()
  if has_waiters() == (last ~= nil) and enqueue(last) then
    -- No group needs these keys for longer.
    call('PEXPIRE', QUEUE, IDLE)
    call('PEXPIRE', ENTRIES, IDLE)
    if not last then update_lock_key(true) end
    return { last and call('ZCARD', QUEUE) - 1 or 0, lease_left(), 0 }
  end
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
end
if not blocked and fits(mode) then
  local first = grant(me, mode, ttl, ttl, record)
  update_lock_key()
  return { first, tokens }
end
if is_try then
  -- A server that was demoted refuses to write. It must not be believed for as long as the lease lasts.
  check_writable()
  return { -1, lease_left(), is_foreign() and 1 or 0 }
end

enqueue(last_arrival())
extend(QUEUE, IDLE)
extend(ENTRIES, IDLE)
local mine = grant_from_queue(me)
if mine then return { mine, tokens } end
return { call('ZRANK', QUEUE, me), lease_left(), is_foreign() and 1 or 0 }
