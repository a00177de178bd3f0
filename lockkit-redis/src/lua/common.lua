-- What every script that does not end on its fast path begins with.
--
--   <lock>                     lockkit:<value> one exclusive holder, nobody waits
--                              lockkit+<value> one exclusive holder, somebody waits
--                              lockkit#shared, lockkit#permits <n>: whoever is in `holders`
--                              anything else: a foreign client's hold
--                              It expires with the (longest) lease, or GRACE later while somebody waits: whoever
--                              comes meanwhile finds it and serves the queue, instead of going before it.
--   lockkit#holders:{<lock>}   shared holders and permits: owner -> end of the lease in ms of the server's clock
--   lockkit#queue:{<lock>}     waiters: owner -> arrival in us, made unique
--   lockkit#about:{<lock>}     waiters, shared holders and permits: owner -> "<mode> <ttl> <value>"
--   lockkit#client:<client>    there while a client with waiters is alive; the channel of its wake-ups has this name too.
--                              One with a dot in its name looks by itself whose turn is next, every LOOKED ms
--   lockkit#fence              the last fencing token of this database
--
-- <value> is "<owner> <tokens> <first token> <client> <label>". In the entry of a waiter the token is still "%d". In
-- that of an uncontended grant it is "-": SET and INCRBY went out together, and the one does not know the other's reply. The holder's first renewal, a few milliseconds later, fills it in.
local call = redis.call
local LOCK = KEYS[1]
local HOLDERS, QUEUE, ABOUT = 'lockkit#holders:{' .. LOCK .. '}', 'lockkit#queue:{' .. LOCK .. '}', 'lockkit#about:{' .. LOCK .. '}'
local CLIENT, FENCE = 'lockkit#client:', 'lockkit#fence'
local CLAIM = 3000 -- for how long a hold that was passed on waits for its new holder to take it, in ms
local GRACE = 10000 -- by how much a lock that somebody waits for outlives its lease, in ms
local LOOKED = 2500 -- how often a client looks which of its waiters have become the first in the queue, in ms
local BELIEVED = 10000 -- for how long a waiter counts as alive that has come, or whose client has said so, in ms
local IDLE = 600000 -- what nobody has touched for so long is forgotten, in ms

local time = call('TIME')
local micros = time[1] * 1000000 + time[2]
local now = math.floor(micros / 1000)
local value = call('GET', LOCK)

local function is_group() return value and string.sub(value, 1, 8) == 'lockkit#' end
local function holder() return value and string.match(value, '^lockkit[:+](%x+) ') end
local function is_foreign() return value and not is_group() and not holder() end
local function token_of(text) return tonumber(string.match(text, '^%S+ %d+ (%d+) ')) end
local function client_of(text) return string.match(text, '^%S+ %S+ %S+ (%S+)') end

local function about(owner)
  local entry = call('HGET', ABOUT, owner)
  if entry then return string.match(entry, '^(%S+) (%d+) (.*)$') end
end

-- A block of tokens above all others, those of another master in whose place this one is again included: the counter
-- is not behind the clock.
local function draw(tokens)
  local last = call('INCRBY', FENCE, tokens)
  if last - tokens < micros then
    last = micros + tokens
    call('SET', FENCE, string.format('%d', last))
  end
  return last - tokens + 1
end

local function expire(key, ms)
  if call('PTTL', key) < ms then call('PEXPIRE', key, ms) end
end

local function longest() return call('ZREVRANGE', HOLDERS, 0, 0, 'WITHSCORES')[2] - now end

-- What is left of the lease; of the first to end, if there are several. -1 if it has no end.
local function left()
  if is_group() then return call('ZRANGE', HOLDERS, 0, 0, 'WITHSCORES')[2] - now end
  local ms = call('PTTL', LOCK)
  if holder() and string.sub(value, 8, 8) == '+' then return ms - GRACE end
  return ms
end

-- Makes the key say whether somebody waits, and last accordingly. `lease` is what is left of an exclusive one.
local function settle(lease)
  if not value or is_foreign() then return end
  local waited_for = call('EXISTS', QUEUE) == 1
  if is_group() then
    lease = longest()
    expire(HOLDERS, lease + IDLE)
    expire(ABOUT, lease + IDLE)
  else
    value = (waited_for and 'lockkit+' or 'lockkit:') .. string.sub(value, 9)
  end
  call('SET', LOCK, value, 'PX', math.max(1, lease + (waited_for and GRACE or 0)))
end

-- Forgets holders whose lease is over, and all of a group if the key no longer says that they hold.
local function drop_ended()
  if holder() and left() <= 0 then
    call('DEL', LOCK)
    value = false
  end
  local ended = call('ZRANGEBYSCORE', HOLDERS, '-inf', is_group() and now or '+inf')
  for _, owner in ipairs(ended) do
    call('ZREM', HOLDERS, owner)
    call('HDEL', ABOUT, owner)
  end
  if is_group() and call('EXISTS', HOLDERS) == 0 then
    call('DEL', LOCK)
    value = false
  end
end

local function group_of(mode)
  if mode == 's' then return 'lockkit#shared' end
  if mode ~= 'x' then return 'lockkit#permits ' .. string.sub(mode, 2) end
end

local function fits(mode)
  if not value then return true end
  if value ~= group_of(mode) then return false end
  return mode == 's' or call('ZCARD', HOLDERS) < tonumber(string.sub(mode, 2))
end

local function grant(owner, mode, ttl, lease, text)
  local first = draw(string.match(text, '^%S+ (%d+) '))
  if mode == 'x' then
    call('HDEL', ABOUT, owner)
    value = 'lockkit:' .. string.format(text, first)
  else
    value = group_of(mode)
    call('ZADD', HOLDERS, now + lease, owner)
    call('HSET', ABOUT, owner, mode .. ' ' .. ttl .. ' ' .. string.format(text, first))
  end
  settle(lease)
  return first
end

local function wake(owner, client, ms)
  return call('PUBLISH', CLIENT .. client, owner .. ' ' .. ms .. ' ' .. LOCK)
end

local function first() return call('ZRANGE', QUEUE, 0, 0)[1] end

-- Clients of the version before are told, and do not look.
local function looks(client) return string.find(client, '.', 1, true) end

local function is_alive(client, came)
  return micros - came < BELIEVED * 1000 or call('EXISTS', CLIENT .. client) == 1
end

-- Grants from the head of the queue for as long as it fits, to `me` in full and to others for them to take up.
-- Whoever is dead goes, also if it does not fit: nobody is to wait behind it.
-- Whoever is the head then and was not before (`head`, if it has left the queue already) is told for how long it has
-- to wait, unless others were granted and it finds out in time: most wait for less than until their next look.
-- Returns the first token of `me`, and whether anyone is left who is not just reconnecting.
local function serve(me, head)
  head = head or first()
  local mine
  local passed = false
  local blocked = false
  local at = 0
  while not blocked do
    local entry = call('ZRANGE', QUEUE, at, at, 'WITHSCORES')
    local owner, came = entry[1], entry[2]
    if not owner then break end
    local mode, ttl, text = about(owner)
    local fit = mode and fits(mode)
    if fit and owner == me then
      call('ZREM', QUEUE, owner)
      mine = grant(owner, mode, ttl, ttl, text)
    elseif fit and wake(owner, client_of(text), 0) > 0 then
      call('ZREM', QUEUE, owner)
      grant(owner, mode, ttl, math.min(ttl, CLAIM), text)
      passed = true
    elseif mode and (owner == me or is_alive(client_of(text), came)) then
      blocked = not fit
      at = at + 1 -- if it fits, it is reconnecting: it keeps its place and is passed over
    else
      call('ZREM', QUEUE, owner)
      call('HDEL', ABOUT, owner)
      -- One that stood still for so long and goes on is to queue up anew.
      if mode and not fit then wake(owner, client_of(text), 1) end
    end
  end
  if value then settle(left()) end
  local next = first()
  if next and next ~= head and next ~= me and value then
    local _, _, text = about(next)
    local ms = text and left()
    if ms and not (passed and looks(client_of(text)) and ms >= LOOKED) then
      -- A foreign client's release has to be looked out for from now on.
      wake(next, client_of(text), is_foreign() and 1 or math.max(1, ms))
    end
  end
  return mine, blocked
end
