-- Returns the number that was read from the counter, or 0 if there is no counter. Whatever else is there is no number: Lua takes `0x10`,
-- `1.5` and `nan` for some.
local function last_token(read)
  if not read then return 0 end
  return type(read) == 'string' and tonumber(string.match(read, '^-?%d+$'))
end

-- Draws tokens above all that were drawn before, also at another master in whose place this one is now: the counter is never
-- behind the clock. Returns the first.
local function draw_tokens(tokens, micros)
  local fence = OWN .. 'fence'
  -- One call that reads and writes is enough if the clock is ahead. It lowers the counter if not, until that is written below.
  -- Redis 6.0 does not know it. If it failed for another reason, what follows does so, too.
  local before = redis.pcall('SET', fence, string.format('%d', micros + tokens), 'GET')
  local is_written = type(before) ~= 'table'
  if not is_written then before = redis.pcall('GET', fence) end
  if type(before) == 'table' and not string.find(before.err, 'WRONGTYPE', 1, true) then call('GET', fence) end
  local last = last_token(before)
  -- Beyond, Lua cannot tell numbers apart.
  local are_left = last and last < 2 ^ 53 - tokens
  if not are_left then
    if is_written then call('SET', fence, before) end
    if last then error('no fencing tokens are left: ' .. fence .. ' is at its end') end
    error('the counter of fencing tokens, ' .. fence .. ', is no number; delete the key: tokens go on from the clock')
  end
  local first = math.max(last, micros) + 1
  if not is_written or last > micros then call('SET', fence, string.format('%d', first + tokens - 1)) end
  return first
end
