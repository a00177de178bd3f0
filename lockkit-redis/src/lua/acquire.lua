-- An acquisition that is asked for twice is granted once: it is known by its owner.
-- ARGV: 1 the value, with %d for the token   2 how many tokens   3 ttl in ms   4 mode: x, s, p<permits>
--       5 there if it is a try, which keeps out of the queue
-- Returns the first token, or {place in the queue or -1, ms left of the lease or -1, 1 if held by a foreign client},
-- or a text: the number of permits that the semaphore has instead.
local mode = ARGV[4]
local ttl = ARGV[3]
local text = string.sub(ARGV[1], 9)
local me = string.sub(text, 1, 32)
drop_ended()

-- The reply to an earlier request was lost, or the hold was passed on. A server without memory refuses to set and to
-- add, but not to a script that has begun to write.
if holder() == me then
  call('PEXPIRE', LOCK, ttl)
  local tokens, first = string.match(value, '^%S+ (%d+) (%d+) ')
  first = tonumber(first)
  -- One that was taken without a script has not said its token, or has reserved fewer.
  if not first or tokens ~= ARGV[2] then
    first = draw(ARGV[2])
    value = 'lockkit:' .. string.format(text, first)
  end
  settle(ttl)
  return first
end
if call('ZSCORE', HOLDERS, me) then
  local _, _, mine = about(me)
  call('PEXPIRE', LOCK, ttl)
  call('ZADD', HOLDERS, now + ttl, me)
  settle()
  return tonumber(string.match(mine, '^%S+ %S+ (%d+) '))
end

local permits = value and string.match(value, '^lockkit#permits (%d+)$')
if permits and permits ~= string.sub(mode, 2) then return permits end

local blocked = call('EXISTS', QUEUE) == 1
if blocked and ARGV[5] then
  local _
  _, blocked = serve()
end
if not blocked and fits(mode) then return grant(me, mode, ttl, ttl, text) end
if ARGV[5] then return { -1, left(), is_foreign() and 1 or 0 } end

if not call('ZSCORE', QUEUE, me) then
  -- After all others, also when the clock went back.
  local last = call('ZREVRANGE', QUEUE, 0, 0, 'WITHSCORES')[2] or 0
  call('ZADD', QUEUE, math.max(last + 1, micros), me)
  call('HSET', ABOUT, me, mode .. ' ' .. ttl .. ' ' .. text)
end
expire(QUEUE, IDLE)
expire(ABOUT, IDLE)
local mine = serve(me)
if mine then return mine end
return { call('ZRANK', QUEUE, me), left(), is_foreign() and 1 or 0 }
