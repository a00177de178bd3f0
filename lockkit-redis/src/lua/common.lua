-- The prelude of every script that did not end on a fast path.
local function is_group() return value and string.sub(value, 1, 8) == 'lockkit#' end
local function exclusive_holder() return value and string.match(value, '^lockkit[:+](%x+) ') end
local function is_foreign() return value and not is_group() and not exclusive_holder() end
local function has_waiters() return string.sub(value, 8, 8) == '+' end
local function token_of(record) return tonumber(string.match(record, '^%S+ %d+ (%d+) ')) end
local function client_of(record) return string.match(record, '^%S+ %S+ %S+ (%S+)') end

-- Returns mode, ttl and record of a waiter or member.
local function entry_of(owner)
  local entry = call('HGET', ENTRIES, owner)
  if entry then return string.match(entry, '^(%S+) (%d+) (.*)$') end
end

local function extend(key, ms)
  if call('PTTL', key) < ms then call('PEXPIRE', key, ms) end
end

-- Returns what is left of the lease, of a group's first to end. -1 if it has no end.
local function lease_left()
  if is_group() then return call('ZRANGE', HOLDERS, 0, 0, 'WITHSCORES')[2] - now end
  if not exclusive_holder() then return call('PTTL', LOCK) end
  lease = lease or call('PTTL', LOCK) - (has_waiters() and GRACE or 0)
  return lease
end

-- Makes the key say whether somebody waits, and last accordingly. Looks at the queue if the caller does not know.
local function update_lock_key(waited_for)
  if not value or is_foreign() then return end
  if waited_for == nil then waited_for = call('EXISTS', QUEUE) == 1 end
  local ms
  if is_group() then
    ms = call('ZREVRANGE', HOLDERS, 0, 0, 'WITHSCORES')[2] - now
    extend(HOLDERS, ms + IDLE)
    extend(ENTRIES, ms + IDLE)
  else
    ms = lease_left()
    value = (waited_for and 'lockkit+' or 'lockkit:') .. string.sub(value, 9)
  end
  call('SET', LOCK, value, 'PX', math.max(1, ms + (waited_for and GRACE or 0)))
end

local members_are_current = false

-- Drops members of the group whose lease has ended, or all if the key no longer names a group. Comes before any member counts
-- for anything.
local function drop_expired_members()
  if members_are_current then return end
  members_are_current = true
  local ended = call('ZRANGEBYSCORE', HOLDERS, '-inf', is_group() and now or '+inf')
  for _, owner in ipairs(ended) do
    call('ZREM', HOLDERS, owner)
    call('HDEL', ENTRIES, owner)
  end
  if is_group() and call('EXISTS', HOLDERS) == 0 then
    call('DEL', LOCK)
    value = false
  end
end

local function drop_expired_holders()
  if exclusive_holder() then
    -- Beside an exclusive holder there are no members that count.
    if lease_left() > 0 then return end
    call('DEL', LOCK)
    value = false
  end
  drop_expired_members()
end

local function is_member(owner)
  drop_expired_members()
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

-- Grants with a lease of `ms`, and the tokens from `first` on if they are drawn already. The caller updates the key.
local function grant(owner, mode, ttl, ms, record, first)
  first = first or draw_tokens(string.match(record, '^%S+ (%d+) '), micros)
  if mode == 'x' then
    call('HDEL', ENTRIES, owner)
    value = 'lockkit:' .. string.format(record, first)
    lease = tonumber(ms)
  else
    drop_expired_members()
    value = group_of(mode)
    call('ZADD', HOLDERS, now + ms, owner)
    call('HSET', ENTRIES, owner, mode .. ' ' .. ttl .. ' ' .. string.format(record, first))
  end
  return first
end

-- Publishes to a client what has become of its claim. Only at this server: a client whose master was demoted still listens
-- there, and must not be told what is granted here. Returns how many received it.
local function publish(owner, client, what)
  redis.set_repl(redis.REPL_NONE)
  local receivers = call('PUBLISH', client, owner .. ' ' .. what .. ' ' .. LOCK)
  redis.set_repl(redis.REPL_ALL)
  return receivers
end

local function queue_head() return call('ZRANGE', QUEUE, 0, 0)[1] end

-- A push names the token only in the script of a holder. Who only comes by, or breaks a hold, may lack a right that it takes to write the
-- next one. Then the script fails after the push, with the lock free: whoever was told asks, and believes nothing.
local by_holder = false

-- Grants to another, if its client receives the push. The push goes first, since its receivers show whether the client is
-- connected; its tokens are known and not drawn yet. If none are left, the waiter is told to ask, and gets the error itself.
local function hand_off(owner, mode, ttl, record)
  local client, tokens = client_of(record), string.match(record, '^%S+ (%d+) ')
  -- One that is no number is as good as one that is at its end.
  local counter = last_token(redis.pcall('GET', OWN .. 'fence')) or 2 ^ 53
  local first = math.max(micros, counter) + 1
  if first > 2 ^ 53 - tokens then
    publish(owner, client, 1)
    return false
  end
  local takes_hand_offs = by_holder and string.sub(client, -1) == 't'
  if publish(owner, client, takes_hand_offs and string.format('0:%d', first) or 0) == 0 then return false end
  call('ZREM', QUEUE, owner)
  call('SET', OWN .. 'fence', string.format('%d', first + tokens - 1))
  grant(owner, mode, ttl, math.min(ttl, HANDOFF_TTL), record, first)
  return true
end

-- Has the first in the queue look again at the end of the lease, if that is now earlier than it was told.
local function tell_if_shorter(ms, left)
  if ms >= left then return end
  local head = queue_head()
  local _, _, record = entry_of(head or '')
  if record then publish(head, client_of(record), math.max(1, lease_left())) end
end

local function is_alive(client, came)
  return micros - came < ALIVE_FOR * 1000 or call('EXISTS', client) == 1
end

-- Grants from the head of the queue for as long as the head fits: to `me` in full, to others by a hand-off. Drops the dead, also
-- those that would not fit, so that nobody waits behind them.
-- Tells a waiter that has become the head how long the lease before it lasts. `head` is the head before, if the caller has taken
-- that out of the queue already. Exception: after a hand-off whose lease lasts for a HEARTBEAT or longer, nobody is told: the
-- client looks at its next heartbeat.
-- Returns the first token of `me`, and whether a waiter is left that is not just reconnecting.
local function grant_from_queue(me, head)
  local mine, next, next_record
  local granted, handed_off, blocked = false, false, false
  local at = 0
  while not blocked do
    local entry = call('ZRANGE', QUEUE, at, at, 'WITHSCORES')
    local owner, came = entry[1], entry[2]
    if not owner then break end
    head = head or owner
    local mode, ttl, record = entry_of(owner)
    local fit = mode and fits(mode)
    if fit and owner == me then
      call('ZREM', QUEUE, owner)
      mine = grant(owner, mode, ttl, ttl, record)
      granted = true
    elseif fit and hand_off(owner, mode, ttl, record) then
      granted, handed_off = true, true
    elseif mode and (owner == me or is_alive(client_of(record), came)) then
      blocked = not fit
      if at == 0 then
        next, next_record = owner, record
      end
      at = at + 1 -- one that fits is reconnecting: it keeps its place, and is passed over
    else
      call('ZREM', QUEUE, owner)
      call('HDEL', ENTRIES, owner)
      -- If it only stood still, it joins the queue again.
      if mode and not fit then publish(owner, client_of(record), 1) end
    end
  end
  local waited_for = next ~= nil
  -- How long a group's key lasts does not show whether anybody waited.
  if granted or is_group() or (exclusive_holder() and has_waiters() ~= waited_for) then update_lock_key(waited_for) end
  if next and next ~= head and next ~= me and value then
    local ms = lease_left()
    if not (handed_off and ms >= HEARTBEAT) then
      -- The head asks again and again while a foreign client holds: nobody will tell it of the release.
      publish(next, client_of(next_record), is_foreign() and 1 or math.max(1, ms))
    end
  end
  return mine, blocked
end
