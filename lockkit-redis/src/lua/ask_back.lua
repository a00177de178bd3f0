-- Asks the holder of the hold that has this token to give it up, and tells its client. From then on no renewal prolongs that hold.
-- Returns ms left of its lease, or -1 if there is no such hold. Idempotent.
-- ARGV: 1 the token
local token = tonumber(ARGV[1])
local record, left
drop_expired_holders()
if exclusive_holder() then
  -- A hold that was passed on within its client has one of the tokens that were reserved with the first. It may not have
  -- published that yet: then the mark waits for the renewal which does.
  local first = token_of(value)
  if first and first <= token and token < first + string.match(value, '^%S+ (%d+) ') then
    record, left = string.sub(value, 9), lease_left()
  end
elseif is_group() then
  for _, owner in ipairs(call('ZRANGE', HOLDERS, 0, -1)) do
    local _, _, theirs = entry_of(owner)
    if theirs and token_of(theirs) == token then
      record, left = theirs, call('ZSCORE', HOLDERS, owner) - now
      break
    end
  end
end
if record then
  local owner = string.sub(record, 1, 32)
  -- First: a server without memory refuses HSET, but not within a script that has begun to write.
  check_writable()
  call('HSET', REVOKED, owner, ARGV[1])
  extend(REVOKED, left + GRACE)
  publish(owner, client_of(record), 0)
else
  check_writable()
end
grant_from_queue()
return record and math.max(0, left) or -1
