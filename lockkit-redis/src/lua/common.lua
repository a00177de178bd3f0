-- What every script goes on with that did not end on its fast path. `value` is what was found at the key.
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
--                              One with a dot in its name looks by itself whose turn is next, every LOOKED ms; one
--                              with a `t` in it takes up what it is passed without asking, and is told its token
--   lockkit#fence              the last fencing token of this database
--
-- <value> is "<owner> <tokens> <first token> <client> <label>". In the entry of a waiter the token is still "%d". The
-- version before has "-" in the first milliseconds of a hold.
local HOLDERS, QUEUE, ABOUT = 'lockkit#holders:{' .. LOCK .. '}', 'lockkit#queue:{' .. LOCK .. '}', 'lockkit#about:{' .. LOCK .. '}'
local CLIENT = 'lockkit#client:'
local CLAIM = 3000 -- for how long a hold that was passed on waits for its new holder to take it, in ms
local GRACE = 10000 -- by how much a lock that somebody waits for outlives its lease, in ms
local LOOKED = 2500 -- how often a client looks which of its waiters have become the first in the queue, in ms
local BELIEVED = 10000 -- for how long a waiter counts as alive that has come, or whose client has said so, in ms
local IDLE = 600000 -- what nobody has touched for so long is forgotten, in ms

local time = call('TIME')
local micros = time[1] * 1000000 + time[2]
local now = math.floor(micros / 1000)
-- What is left of the lease of one that holds alone, once it is known.
local lease

local function is_group() return value and string.sub(value, 1, 8) == 'lockkit#' end
local function holder() return value and string.match(value, '^lockkit[:+](%x+) ') end
local function is_foreign() return value and not is_group() and not holder() end
local function is_waited_for() return string.sub(value, 8, 8) == '+' end
local function token_of(text) return tonumber(string.match(text, '^%S+ %d+ (%d+) ')) end
local function client_of(text) return string.match(text, '^%S+ %S+ %S+ (%S+)') end

local function about(owner)
  local entry = call('HGET', ABOUT, owner)
  if entry then return string.match(entry, '^(%S+) (%d+) (.*)$') end
end

local function expire(key, ms)
  if call('PTTL', key) < ms then call('PEXPIRE', key, ms) end
end

local function longest() return call('ZREVRANGE', HOLDERS, 0, 0, 'WITHSCORES')[2] - now end

-- What is left of the lease; of the first to end, if there are several. -1 if it has no end.
local function left()
  if is_group() then return call('ZRANGE', HOLDERS, 0, 0, 'WITHSCORES')[2] - now end
  if not holder() then return call('PTTL', LOCK) end
  lease = lease or call('PTTL', LOCK) - (is_waited_for() and GRACE or 0)
  return lease
end

-- Makes the key say whether somebody waits, and last accordingly. If it is not known, the queue tells.
local function settle(waited_for)
  if not value or is_foreign() then return end
  if waited_for == nil then waited_for = call('EXISTS', QUEUE) == 1 end
  local ms
  if is_group() then
    ms = longest()
    expire(HOLDERS, ms + IDLE)
    expire(ABOUT, ms + IDLE)
  else
    ms = left()
    value = (waited_for and 'lockkit+' or 'lockkit:') .. string.sub(value, 9)
  end
  call('SET', LOCK, value, 'PX', math.max(1, ms + (waited_for and GRACE or 0)))
end

local is_swept = false

-- Forgets shared holders and permits whose lease is over, and all of them if the key no longer says that they hold. To be
-- done before any of them counts for anything.
local function sweep()
  if is_swept then return end
  is_swept = true
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

-- Forgets holders whose lease is over.
local function drop_ended()
  if holder() then
    -- As long as it holds alone, nobody else does.
    if left() > 0 then return end
    call('DEL', LOCK)
    value = false
  end
  sweep()
end

local function shares(owner)
  sweep()
  return call('ZSCORE', HOLDERS, owner)
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

-- To be settled by the caller. The tokens from `first` on if they are not to be drawn anew.
local function grant(owner, mode, ttl, ms, text, first)
  local tokens = string.match(text, '^%S+ (%d+) ')
  if first then
    call('SET', 'lockkit#fence', string.format('%d', first + tokens - 1))
  else
    first = draw(tokens, micros)
  end
  if mode == 'x' then
    call('HDEL', ABOUT, owner)
    value = 'lockkit:' .. string.format(text, first)
    lease = tonumber(ms)
  else
    sweep()
    value = group_of(mode)
    call('ZADD', HOLDERS, now + ms, owner)
    call('HSET', ABOUT, owner, mode .. ' ' .. ttl .. ' ' .. string.format(text, first))
  end
  return first
end

-- At this server alone: who listens at a replica, as a client does whose master was demoted, is not told what is granted here.
local function wake(owner, client, ms)
  redis.set_repl(redis.REPL_NONE)
  local told = call('PUBLISH', CLIENT .. client, owner .. ' ' .. ms .. ' ' .. LOCK)
  redis.set_repl(redis.REPL_ALL)
  return told
end

-- A server that refuses to write says so now. To be done before `serve` by whoever has not written yet: nobody is to be told
-- that he holds what cannot be written.
local function may_write() call('DEL', 'lockkit#nowhere') end

local function first() return call('ZRANGE', QUEUE, 0, 0)[1] end

-- Clients of the version before are told, and do not look.
local function looks(client) return string.find(client, '.', 1, true) end

-- Grants to another, if its client is told. That is done first, when the token is known and not drawn yet. Where there is none
-- left, it asks, and is told so.
local function pass(owner, mode, ttl, text)
  local client = client_of(text)
  local first = math.max(micros, tonumber(call('GET', 'lockkit#fence') or 0)) + 1
  if first > 2 ^ 53 - string.match(text, '^%S+ (%d+) ') then
    wake(owner, client, 1)
    return false
  end
  local takes_up = string.find(client, 't', 1, true)
  if wake(owner, client, takes_up and string.format('0:%d', first) or 0) == 0 then return false end
  call('ZREM', QUEUE, owner)
  grant(owner, mode, ttl, math.min(ttl, CLAIM), text, first)
  return true
end

local function is_alive(client, came)
  return micros - came < BELIEVED * 1000 or call('EXISTS', CLIENT .. client) == 1
end

-- Grants from the head of the queue for as long as it fits, to `me` in full and to others for them to take up.
-- Whoever is dead goes, also if it does not fit: nobody is to wait behind it.
-- Whoever is the head then and was not before (`head`, if it has left the queue already) is told for how long it has
-- to wait, unless others were granted and it finds out in time: most wait for less than until their next look.
-- Returns the first token of `me`, and whether anyone is left who is not just reconnecting.
local function serve(me, head)
  local mine, next, next_text
  local granted, passed, blocked = false, false, false
  local at = 0
  while not blocked do
    local entry = call('ZRANGE', QUEUE, at, at, 'WITHSCORES')
    local owner, came = entry[1], entry[2]
    if not owner then break end
    head = head or owner
    local mode, ttl, text = about(owner)
    local fit = mode and fits(mode)
    if fit and owner == me then
      call('ZREM', QUEUE, owner)
      mine = grant(owner, mode, ttl, ttl, text)
      granted = true
    elseif fit and pass(owner, mode, ttl, text) then
      granted, passed = true, true
    elseif mode and (owner == me or is_alive(client_of(text), came)) then
      blocked = not fit
      if at == 0 then
        next, next_text = owner, text
      end
      at = at + 1 -- if it fits, it is reconnecting: it keeps its place and is passed over
    else
      call('ZREM', QUEUE, owner)
      call('HDEL', ABOUT, owner)
      -- One that stood still for so long and goes on is to queue up anew.
      if mode and not fit then wake(owner, client_of(text), 1) end
    end
  end
  local waited_for = next ~= nil
  -- How long a group's key lasts does not show whether it has been waited for.
  if granted or is_group() or (holder() and is_waited_for() ~= waited_for) then settle(waited_for) end
  if next and next ~= head and next ~= me and value then
    local client, ms = client_of(next_text), left()
    if not (passed and looks(client) and ms >= LOOKED) then
      -- A foreign client's release has to be looked out for from now on.
      wake(next, client, is_foreign() and 1 or math.max(1, ms))
    end
  end
  return mine, blocked
end
