-- Raises the counter of fencing tokens, the only key.
-- ARGV: 1 the token that all later ones have to be above   2 `raise`; or `show`, to write nothing
-- Returns the counter, or the clock if that is ahead. A counter that is missing, or older than the last tokens, says nothing about
-- them, since they began at the clock.
local last = last_token(call('GET', KEYS[1]))
if not last then error('the counter of fencing tokens, ' .. KEYS[1] .. ', is no number; delete the key: tokens go on from the clock') end
local time = call('TIME')
last = math.max(last, time[1] * 1000000 + time[2])
if ARGV[2] == 'raise' then
  last = math.max(last, tonumber(ARGV[1]))
  call('SET', KEYS[1], string.format('%d', last))
end
return last
