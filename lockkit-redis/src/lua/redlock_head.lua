-- What every script of a Redlock master begins with.
local call = redis.call
local LOCK = KEYS[1]
local FENCE = 'lockkit#fence:{' .. LOCK .. '}'

-- Whether this process has a vote: the marker names it, and the longest ttl that the caller goes by. A process that was
-- started since may have lost what the one before it granted, and one that was kept out for less, what was granted for more.
local function has_vote(marker) return call('GET', 'lockkit#redlock') == marker end

-- Raises the counter to `last` if that makes all tokens from `first` on new here. 1, or where it stands instead.
local function raise(first, last)
  local fence = call('GET', FENCE)
  if fence and tonumber(fence) >= tonumber(first) then return fence end
  call('SET', FENCE, last)
  return 1
end
