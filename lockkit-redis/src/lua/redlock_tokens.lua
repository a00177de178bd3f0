-- Tokens begin at clients' clocks. So weeks after the last token new ones are above it, even without the counter.
local WEEKS = 4 * 7 * 24 * 3600 * 1000
local FENCE = OWN .. 'fence:{' .. LOCK .. '}'

-- Reads all that a vote goes by in one call: whether this process has one, the counter, and the value. A key that is not a string is
-- missing there.
local function read(marker)
  local key, expected = string.match(marker, '^(%S+) (.*)$')
  local known = call('MGET', key, FENCE, LOCK)
  return known[1] == expected, known[2], known[3]
end

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
