-- Draws tokens above all that were drawn before, also at another master in whose place this one is now: the counter is never
-- behind the clock. Returns the first.
local function draw_tokens(tokens, micros)
  local last = redis.pcall('INCRBY', OWN .. 'fence', tokens)
  if type(last) == 'table' then
    local why = last.err
    if string.find(why, 'not an integer', 1, true) or string.find(why, 'WRONGTYPE', 1, true) then
      error('the counter of fencing tokens, ' .. OWN .. 'fence, is no number; delete the key: tokens go on from the clock')
    end
    -- Fails as before, and with the code of the error.
    last = string.find(why, 'overflow', 1, true) and 2 ^ 53 or call('INCRBY', OWN .. 'fence', tokens)
  end
  if last - tokens < micros then
    last = micros + tokens
    call('SET', OWN .. 'fence', string.format('%d', last))
  elseif last >= 2 ^ 53 then
    -- Lua cannot tell such numbers apart.
    error('no fencing tokens are left: ' .. OWN .. 'fence is at its end')
  end
  return last - tokens + 1
end
