-- The head of every script of a Redlock master.
local call = redis.call
local LOCK = KEYS[1]
-- What is lockkit's own begins with the namespace, as the lock does. A user's rights may end there.
local OWN = (string.match(LOCK, '^[%w._-]+:') or '') .. 'lockkit#'
local FENCE = OWN .. 'fence:{' .. LOCK .. '}'
local value -- of the lock, once it has been read

-- Returns whether this process has a vote: the marker names it, and the longest ttl that the caller goes by. A process that
-- started later may have lost grants. One that was in quarantine for less may have lost grants that last longer.
-- The caller gives the marker's key, too: with an empty namespace, a lock may be one of another namespace as well.
local function has_vote(marker)
  local key, expected = string.match(marker, '^(%S+) (.*)$')
  return call('GET', key) == expected
end

-- Tokens begin at clients' clocks. So weeks after the last token new ones are above it, even without the counter.
local WEEKS = 4 * 7 * 24 * 3600 * 1000

-- Raises the counter from `fence` to `last`, if all tokens from `first` on are new here. Returns 1, or `fence`.
local function raise(first, last, fence)
  if fence then
    local counter = tonumber(fence)
    if not counter then error('the counter of fencing tokens, ' .. FENCE .. ', is no number: delete it') end
    if counter >= tonumber(first) then return fence end
  end
  -- A counter ahead of the clock stays until weeks after the clock has reached it.
  local ahead = math.floor(last / 1000) - call('TIME')[1] * 1000
  call('SET', FENCE, last, 'PX', string.format('%d', WEEKS + math.max(0, ahead)))
  return 1
end

-- Keeps a counter that is in use.
local function keep_counter()
  local left = call('PTTL', FENCE)
  if left >= 0 and left < WEEKS / 2 then call('PEXPIRE', FENCE, WEEKS) end
end
