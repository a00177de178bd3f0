-- Raises the counter of fencing tokens, the only key.
-- ARGV: 1 the token that all later ones have to be above   2 `raise`; or `show`, to write nothing
-- Returns the counter. Without one, tokens begin at the clock.
local last = redis.call('GET', KEYS[1])
if last then
  last = tonumber(last)
  if not last then error('the counter of fencing tokens, ' .. KEYS[1] .. ', is no number: delete it, and it begins at the clock') end
else
  local time = redis.call('TIME')
  last = time[1] * 1000000 + time[2]
end
if ARGV[2] == 'raise' then
  last = math.max(last, tonumber(ARGV[1]))
  redis.call('SET', KEYS[1], string.format('%d', last))
end
return last
