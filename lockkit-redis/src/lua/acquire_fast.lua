-- The lock is free: the whole of an uncontended acquisition. While somebody waits, the key is there.
-- ARGV: 1 the value, with %.0f for the token   2 how many tokens   3 ttl in ms   (mode `x`, willing to wait)
local first = redis.call('INCRBY', 'lockkit#fence', ARGV[2]) - ARGV[2] + 1
if first > 1 and redis.call('SET', KEYS[1], string.format(ARGV[1], first), 'NX', 'PX', ARGV[3]) then
  return first
end
-- It is taken, and nothing is reserved; or the counter was lost, and is begun anew by what follows.
redis.call('DECRBY', 'lockkit#fence', ARGV[2])
