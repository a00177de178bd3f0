-- Renews a hold that nobody waits for or has asked back, and whose token the key has.
-- ARGV: 1 the value   2 ttl in ms
local value = redis.pcall('GET', LOCK)
if value == ARGV[1] and call('EXISTS', OWN .. 'revoked:{' .. LOCK .. '}') == 0 then return call('PEXPIRE', LOCK, ARGV[2]) end
-- Somebody keeps something else than a string at the key: the hold is gone.
if type(value) == 'table' then
  if string.find(value.err, 'WRONGTYPE', 1, true) then return 0 end
  return value
end
