-- Finds the hold with this token: its value, and what is left of its lease in ms.
-- ARGV: 1 the token   2 the marker with which it has a vote
local token = tonumber(ARGV[1])
local found, ms
drop_ended()
if holder() and has_token(value, token) then
  found, ms = value, call('PTTL', LOCK)
elseif is_shared() then
  for _, owner in ipairs(call('ZRANGE', HOLDERS, 0, -1)) do
    local text = call('HGET', ABOUT, owner)
    if text and has_token(text, token) then
      found, ms = text, call('ZSCORE', HOLDERS, owner) - now
      break
    end
  end
end

-- Until its lease would have been over, no renewal prolongs it here or sets it again: at a master that this request has not reached yet,
-- one may still find it. Tells its client.
local function mark()
  local owner, first, client = string.match(found, '^lockkit:(%S+) %S+ (%S+) (%S+)')
  call('HSET', REVOKED, owner, first)
  call('PEXPIRE', REVOKED, math.max(1, ms, call('PTTL', REVOKED)))
  call('PUBLISH', client, owner .. ' 0 ' .. LOCK)
end
