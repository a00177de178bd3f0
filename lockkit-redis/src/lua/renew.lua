-- Returns 1, or 0 if it is not held any more. What is gone is never made anew.
-- ARGV: 1 the value, known up to the owner at least   2 ttl in ms
local me = string.sub(ARGV[1], 9, 40)
drop_ended()
if holder() == me then
  if string.find(ARGV[1], '^%S+ %d+ %d+ ') then value = ARGV[1] end -- with its token, from now on
  settle(ARGV[2])
  return 1
end
if call('ZSCORE', HOLDERS, me) then
  call('ZADD', HOLDERS, now + ARGV[2], me)
  settle()
  return 1
end
serve()
return 0
