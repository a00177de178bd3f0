-- Draws tokens above all that were drawn before, also at another master in whose place this one is now: the counter is never
-- behind the clock. Returns the first.
local function draw_tokens(tokens, micros)
  local last = call('INCRBY', 'lockkit#fence', tokens)
  if last - tokens < micros then
    last = micros + tokens
    call('SET', 'lockkit#fence', string.format('%d', last))
  elseif last >= 2 ^ 53 then
    -- Lua cannot tell such numbers apart.
    error('no fencing tokens are left: lockkit#fence is at its end')
  end
  return last - tokens + 1
end
