-- Afterwards the owner neither holds nor waits, and whoever is next has been told. Returns 0 if it did not hold, 1 if
-- it did and nobody does now, 2 if somebody else does.
-- ARGV: 1 the value, known up to the owner at least
local me = string.sub(ARGV[1], 9, 40)
local held = 0
drop_ended()
if holder() == me then
  held = call('DEL', LOCK)
  value = false
elseif call('ZREM', HOLDERS, me) == 1 then
  held = 1
  if call('EXISTS', HOLDERS) == 0 then
    call('DEL', LOCK)
    value = false
  end
end
local head = first()
call('ZREM', QUEUE, me)
call('HDEL', ABOUT, me)
serve(nil, head)
return value and 2 * held or held
