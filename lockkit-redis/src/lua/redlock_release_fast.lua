-- ARGV: 1 the value, as far as is known   2 `end`, or `yield` if it goes on waiting
local held = 0
if call('GET', LOCK) == ARGV[1] then
  held = call('DEL', LOCK)
  local waited_for = call('EXISTS', 'lockkit#writers:{' .. LOCK .. '}', 'lockkit#readers:{' .. LOCK .. '}') > 0
  if not waited_for or ARGV[2] == 'yield' then return held end
end
