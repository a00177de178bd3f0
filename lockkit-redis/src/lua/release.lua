-- Afterwards the owner neither holds nor waits, and whoever is next has been told. Returns 1 if it held.
-- ARGV: 1 the value, known up to the owner at least
local me = string.sub(ARGV[1], 9, 40)
local held = 0
drop_ended()
local head
if holder() == me then
  held = 1
  value = false
  -- It may have been granted to a try, which has left its place.
  call('ZREM', QUEUE, me)
else
  sweep()
  if call('ZREM', HOLDERS, me) == 1 then
    held = 1
    if call('EXISTS', HOLDERS) == 0 then value = false end
  end
  head = first()
  call('ZREM', QUEUE, me)
  call('HDEL', ABOUT, me)
end
serve(nil, head)
if held == 1 and not value then call('DEL', LOCK) end
return held
