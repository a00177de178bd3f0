-- Draws tokens above all that were drawn before, also at another master in whose place this one is now: the counter is never
-- behind the clock. Returns the first.
local function draw_tokens(tokens, micros)
  local fence = OWN .. 'fence'
  -- One call that reads and writes is enough if the clock is ahead. It lowers the counter if not, until that is written below.
  -- Redis 6.0 does not know it. If it failed for another reason, what follows does so, too.
  local before = redis.pcall('SET', fence, string.format('%d', micros + tokens), 'GET')
  local is_written = type(before) ~= 'table'
  if not is_written and not string.find(before.err, 'WRONGTYPE', 1, true) then before = call('GET', fence) end
  local last = type(before) ~= 'table' and tonumber(before or 0)
  -- Beyond, Lua cannot tell numbers apart.
  local are_left = last and math.max(last, micros) < 2 ^ 53 - tokens
  if not are_left then
    if is_written then call('SET', fence, before) end
    if last then error('no fencing tokens are left: ' .. fence .. ' is at its end') end
    error('the counter of fencing tokens, ' .. fence .. ', is no number; delete the key: tokens go on from the clock')
  end
  local first = math.max(last, micros) + 1
  if not is_written or last > micros then call('SET', fence, string.format('%d', first + tokens - 1)) end
  return first
end
