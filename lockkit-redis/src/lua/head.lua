local call = redis.call
local LOCK = KEYS[1]
-- What is lockkit's own begins with the namespace, as the lock does. A user's rights may end there.
local OWN = (string.match(LOCK, '^[%w._-]+:') or '') .. 'lockkit#'
