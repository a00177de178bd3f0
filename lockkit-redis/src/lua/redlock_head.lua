-- What every script of a Redlock master begins with.
local call = redis.call
local LOCK = KEYS[1]
local FENCE = 'lockkit#fence:{' .. LOCK .. '}'
local value -- of the lock, if it has been looked at

-- Whether this process has a vote: the marker names it, and the longest ttl that the caller goes by. A process that was
-- started since may have lost what the one before it granted, and one that was kept out for less, what was granted for more.
local function has_vote(marker) return call('GET', 'lockkit#redlock') == marker end

-- Tokens begin at clients' clocks: weeks after the last one they are above it, whatever becomes of the counter.
local WEEKS = 4 * 7 * 24 * 3600 * 1000

-- Raises the counter, which stands at `fence`, to `last` if that makes all tokens from `first` on new here. 1, or where it
-- stands instead.
local function raise(first, last, fence)
  if fence and tonumber(fence) >= tonumber(first) then return fence end
  -- One that is ahead of the clocks stays until weeks after they are there.
  local ahead = math.floor(last / 1000) - call('TIME')[1] * 1000
  call('SET', FENCE, last, 'PX', string.format('%d', WEEKS + math.max(0, ahead)))
  return 1
end

-- It is used.
local function keep_counter()
  local left = call('PTTL', FENCE)
  if left >= 0 and left < WEEKS / 2 then call('PEXPIRE', FENCE, WEEKS) end
end
