-- Reads the lock, and changes nothing.
-- Returns the number of waiters, the value or nil, the rest of its ttl in ms, and for each shared holder the rest of its lease
-- and its value; or -1 if nobody holds here and this process has no vote, since it may have lost a hold.
-- ARGV: 1 the marker with which it has a vote
local silent = #call('ZRANGEBYSCORE', ASKED, '-inf', now - WAITED)
local waiting = math.max(0, call('ZCARD', WRITERS) + call('ZCARD', READERS) - silent)
local shown = { waiting, value, value and call('PTTL', LOCK) or -2 }
if is_shared() then
  local entries = call('ZRANGE', HOLDERS, 0, -1, 'WITHSCORES')
  for i = 1, #entries, 2 do
    local text = call('HGET', ABOUT, entries[i])
    if text and entries[i + 1] - now > 0 then
      shown[#shown + 1] = entries[i + 1] - now
      shown[#shown + 1] = text
    end
  end
end
local is_free = #shown == 3 and (not value or string.sub(value, 1, 8) == 'lockkit#')
if is_free and not has_vote(ARGV[1]) then return -1 end
return shown
