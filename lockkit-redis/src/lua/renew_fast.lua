-- ARGV: 1 the value   2 ttl in ms
local found = redis.pcall('GET', KEYS[1])
if found == ARGV[1] then
  return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
-- Somebody keeps something else at the key than a string: it is not held any more.
if type(found) == 'table' and string.find(found.err, 'WRONGTYPE', 1, true) then return 0 end
