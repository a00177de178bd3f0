-- A block of tokens above all others, those of another master in whose place this one is again included: the counter is not
-- behind the clock. Returns the first.
local function draw(tokens, micros)
  local last = call('INCRBY', 'lockkit#fence', tokens)
  if last - tokens < micros then
    last = micros + tokens
    call('SET', 'lockkit#fence', string.format('%d', last))
  elseif last >= 2 ^ 53 then
    -- Lua cannot tell it from the next.
    error('no fencing tokens are left: lockkit#fence is at its end')
  end
  return last - tokens + 1
end
