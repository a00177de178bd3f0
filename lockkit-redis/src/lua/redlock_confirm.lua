-- Gives higher tokens to the hold that a vote set. A later vote of the same owner has set another value.
-- ARGV: 1 the marker with which it has a vote   2 the value that was set   3 the value with the new tokens   4 the first token
--       5 the last   6 mode: x or s
-- Returns 1, or the counter as a text.
local ABOUT = OWN .. 'about:{' .. LOCK .. '}'
local me = string.sub(ARGV[2], 9, 40)
local alone = ARGV[6] == 'x'
local votes, fence, value = read(ARGV[1])
if not alone then value = value == 'lockkit#shared' and call('HGET', ABOUT, me) end
if not votes or (value ~= ARGV[2] and value ~= ARGV[3]) then return fence or '0' end
if value == ARGV[3] then return 1 end
local raised = raise(ARGV[4], ARGV[5], fence)
if raised == 1 then
  if alone then
    call('SET', LOCK, ARGV[3], 'KEEPTTL')
  else
    call('HSET', ABOUT, me, ARGV[3])
  end
end
return raised
