-- Nobody holds the lock and nobody waits: the whole of an uncontended acquisition.
-- ARGV: 1 the value, with %.0f for the token   2 how many tokens   3 ttl in ms   (mode `x`, willing to wait)
if redis.call('EXISTS', KEYS[1], 'lockkit#queue:{' .. KEYS[1] .. '}') == 0 then
  local first = redis.call('INCRBY', 'lockkit#fence', ARGV[2]) - ARGV[2] + 1
  if first > 1 then
    redis.call('PSETEX', KEYS[1], ARGV[3], string.format(ARGV[1], first))
    return first
  end
  -- The counter was lost. What follows starts it anew above the clock.
  redis.call('DEL', 'lockkit#fence')
end
