local call = redis.call
local LOCK = KEYS[1]
local value = call('GET', LOCK)
