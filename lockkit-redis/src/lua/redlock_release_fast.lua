-- ARGV: 1 the value, as far as is known   2 `end`, or `yield` if the owner goes on waiting
local held = 0
value = call('GET', LOCK)
if value == ARGV[1] then
  if ARGV[2] == 'yield' or call('EXISTS', OWN .. 'writers:{' .. LOCK .. '}', OWN .. 'readers:{' .. LOCK .. '}') == 0 then
    return call('DEL', LOCK)
  end
  held = 1
end
