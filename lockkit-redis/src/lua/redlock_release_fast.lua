-- ARGV: 1 the value, as far as is known   2 `end`, or `yield` if the owner goes on waiting
local held, lists = 0, 0
value = call('GET', LOCK)
if value == ARGV[1] then
  lists = ARGV[2] == 'end' and call('EXISTS', OWN .. 'writers:{' .. LOCK .. '}', OWN .. 'readers:{' .. LOCK .. '}') or 0
  if lists == 0 then return call('DEL', LOCK) end
  held = 1
end
