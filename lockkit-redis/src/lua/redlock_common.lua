-- The functions of every script that did not end on a fast path.
local HOLDERS, ABOUT = OWN .. 'holders:{' .. LOCK .. '}', OWN .. 'about:{' .. LOCK .. '}'
local REVOKED = OWN .. 'revoked:{' .. LOCK .. '}'
if value == nil then value = call('GET', LOCK) end

local function owner_of(text) return string.sub(text, 9, 40) end
local function holder() return value and string.match(value, '^lockkit:(%x+) ') end
local function kept_for() return value and string.match(value, '^lockkit#next (%S+)$') end
local function is_shared() return value == 'lockkit#shared' end

local function free_if_empty()
  if is_shared() and call('EXISTS', HOLDERS) == 0 then
    call('DEL', LOCK)
    value = false
  end
end

-- Forgets shared holders whose lease is over, and all of them if the key no longer says that they hold. It has to run before
-- a lock becomes shared.
local function drop_ended()
  if not value and call('EXISTS', HOLDERS) == 0 then return end
  for _, owner in ipairs(call('ZRANGEBYSCORE', HOLDERS, '-inf', is_shared() and now or '+inf')) do
    call('ZREM', HOLDERS, owner)
    call('HDEL', ABOUT, owner)
  end
  free_if_empty()
end

-- Returns the rest of the lease in ms, of the first to end if there are several. -1 if it has no end.
local function left()
  if is_shared() then return call('ZRANGE', HOLDERS, 0, 0, 'WITHSCORES')[2] - now end
  return call('PTTL', LOCK)
end

local function forget_waiter(who)
  call('ZREM', WRITERS, who)
  call('ZREM', READERS, who)
  call('ZREM', ASKED, who)
end

-- Forgets waiters that have not asked for too long.
local function drop_silent()
  for _, who in ipairs(call('ZRANGEBYSCORE', ASKED, '-inf', now - WAITED)) do forget_waiter(who) end
end

-- Returns whether a writer waits that came before `arrival`.
local function is_writer_before(arrival)
  drop_silent()
  local first = call('ZRANGE', WRITERS, 0, 0, 'WITHSCORES')
  return first[1] and tonumber(first[2]) < tonumber(arrival)
end

-- Returns whether the owner of this hold was asked to give it up. One that the same owner won later has other tokens.
local function was_asked(text) return text and call('HGET', REVOKED, owner_of(text)) == string.match(text, '^lockkit:%S+ %d+ (%d+) ') end

-- Returns whether the hold with this value has this token.
local function has_token(text, token)
  local tokens, first = string.match(text, '^lockkit:%S+ (%d+) (%d+) ')
  return tokens and tonumber(first) <= token and token < first + tokens
end

-- Returns the value of a shared hold, and what is left of its lease.
local function share_of(owner)
  local till = is_shared() and call('ZSCORE', HOLDERS, owner)
  if till then return call('HGET', ABOUT, owner), till - now end
end

-- Adds or prolongs a shared hold.
local function share(owner, text, ttl)
  -- A server out of memory refuses SET and ZADD, unless the script has written before.
  if is_shared() then call('PEXPIRE', LOCK, ttl) end
  call('ZADD', HOLDERS, now + ttl, owner)
  call('HSET', ABOUT, owner, text)
  local longest = call('ZREVRANGE', HOLDERS, 0, 0, 'WITHSCORES')[2] - now
  value = 'lockkit#shared'
  call('SET', LOCK, value, 'PX', math.max(1, longest))
  call('PEXPIRE', HOLDERS, math.max(1, longest))
  call('PEXPIRE', ABOUT, math.max(1, longest))
end

local function unshare(owner)
  if call('ZREM', HOLDERS, owner) == 0 then return false end
  call('HDEL', ABOUT, owner)
  free_if_empty()
  return true
end

-- Wakes the readers that came before the first writer.
local function wake_readers()
  while true do
    local reader = call('ZRANGE', READERS, 0, 0, 'WITHSCORES')
    if not reader[1] or is_writer_before(reader[2]) then return end
    wake(READERS, reader[1])
  end
end

-- Wakes the first waiter of a free lock, or all readers that came before the first writer, and keeps the lock for them. Returns whether
-- it is kept.
local function tell_next()
  drop_silent()
  local kept
  while true do
    local writer = call('ZRANGE', WRITERS, 0, 0, 'WITHSCORES')
    local reader = call('ZRANGE', READERS, 0, 0, 'WITHSCORES')
    local reads = reader[1] and (not writer[1] or tonumber(reader[2]) < tonumber(writer[2]))
    local next = reads and reader[1] or writer[1]
    if not next or (kept and not reads) then break end
    local woken = wake(reads and READERS or WRITERS, next)
    if woken then
      kept = reads and 's' or woken
      if not reads then break end
    end
  end
  if kept then call('SET', LOCK, 'lockkit#next ' .. kept, 'PX', KEPT) end
  return kept
end
