-- Releases a hold that nobody waits for.
-- ARGV: 1 the value
if value == ARGV[1] then return call('DEL', LOCK) end
