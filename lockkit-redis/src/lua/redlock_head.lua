local value -- of the lock, once it has been read

-- Returns whether this process has a vote: the marker names it, and the longest ttl that the caller goes by. A process that
-- started later may have lost grants. One that was in quarantine for less may have lost grants that last longer.
-- The caller gives the marker's key, too: with an empty namespace, a lock may be one of another namespace as well.
local function has_vote(marker)
  local key, expected = string.match(marker, '^(%S+) (.*)$')
  return call('GET', key) == expected
end
