-- An acquisition that is asked for twice is granted once: it is known by its owner.
-- Returns {first token, how many}, or {place in the queue or -1, ms left of the lease or -1, 1 if held by a foreign
-- client}, or a text: the number of permits that the semaphore has instead.
local mode, ttl, tokens = ARGV[4], ARGV[3], tonumber(ARGV[5])
local is_try = ARGV[6] == 'try'
local me = string.sub(ARGV[1], 9, 40)
local text = me .. ' ' .. tokens .. string.match(ARGV[1], '^%S+ %d+(.*)$')
drop_ended()

-- Behind the one that came last, also when the clock went back. Whether it has not been in the queue.
local function queue_up(last)
  local is_new = call('ZADD', QUEUE, 'NX', string.format('%d', math.max((last or 0) + 1, micros)), me) == 1
  if is_new then call('HSET', ABOUT, me, mode .. ' ' .. ttl .. ' ' .. text) end
  return is_new
end

-- The reply to an earlier request was lost, or the hold was passed on. A server without memory refuses to set and to
-- add, but not to a script that has begun to write.
if holder() == me then
  local reserved, first = string.match(value, '^%S+ (%d+) (%d+) ')
  call('PEXPIRE', LOCK, ttl + (is_waited_for() and GRACE or 0))
  return { tonumber(first), tonumber(reserved) }
end

-- Somebody holds it alone: whoever comes is the last. To ask again is to look as well who before it has died.
if holder() and not is_try then
  -- It may be among shared holders that no longer count: who forgets them later would forget that it waits.
  if mode ~= 'x' then sweep() end
  local last = call('ZREVRANGE', QUEUE, 0, 0, 'WITHSCORES')[2]
  if is_waited_for() == (last ~= nil) and queue_up(last) then
    -- There is no group that needs it for longer.
    call('PEXPIRE', QUEUE, IDLE)
    call('PEXPIRE', ABOUT, IDLE)
    if not last then settle(true) end
    return { last and call('ZCARD', QUEUE) - 1 or 0, left(), 0 }
  end
end

if shares(me) then
  local _, _, mine = about(me)
  call('PEXPIRE', LOCK, ttl)
  call('ZADD', HOLDERS, now + ttl, me)
  settle()
  return { tonumber(string.match(mine, '^%S+ %S+ (%d+) ')), tokens }
end

local permits = value and string.match(value, '^lockkit#permits (%d+)$')
if permits and permits ~= string.sub(mode, 2) then return permits end

local blocked = call('EXISTS', QUEUE) == 1
if blocked and is_try then
  may_write()
  local _
  _, blocked = serve()
end
if not blocked and fits(mode) then
  local first = grant(me, mode, ttl, ttl, text)
  settle()
  return { first, tokens }
end
if is_try then
  -- A server that was demoted refuses to write, and is not to be believed for as long as the lease lasts.
  may_write()
  return { -1, left(), is_foreign() and 1 or 0 }
end

queue_up(call('ZREVRANGE', QUEUE, 0, 0, 'WITHSCORES')[2])
expire(QUEUE, IDLE)
expire(ABOUT, IDLE)
local mine = serve(me)
if mine then return { mine, tokens } end
return { call('ZRANK', QUEUE, me), left(), is_foreign() and 1 or 0 }
