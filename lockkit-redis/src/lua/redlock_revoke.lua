-- Ends the hold with this token, and tells its holder. Returns 1 if there was one; 0 if there is none; or 5 if there is none and this
-- process has no vote, and may have lost it. Until its lease would have been over, the hold is
-- not set here again: at a master that this request has not reached yet, a renewal may still find it.
-- ARGV: 1 the token   2 the marker with which it has a vote
local token = tonumber(ARGV[1])
local function has(text)
  local tokens, first = string.match(text, '^lockkit:%S+ (%d+) (%d+) ')
  return tokens and tonumber(first) <= token and token < first + tokens
end
local ended, ms
drop_ended()
if holder() and has(value) then
  ended, ms = value, call('PTTL', LOCK)
  call('DEL', LOCK)
  value = false
elseif is_shared() then
  for _, owner in ipairs(call('ZRANGE', HOLDERS, 0, -1)) do
    local text = call('HGET', ABOUT, owner)
    if text and has(text) then
      ended, ms = text, call('ZSCORE', HOLDERS, owner) - now
      unshare(owner)
      break
    end
  end
end
if not ended then return has_vote(ARGV[2]) and 0 or 5 end
local owner, first, client = string.match(ended, '^lockkit:(%S+) %S+ (%S+) (%S+)')
call('HSET', REVOKED, owner, first)
call('PEXPIRE', REVOKED, math.max(1, ms, call('PTTL', REVOKED)))
call('PUBLISH', client, owner .. ' 0 ' .. LOCK)
if not value then tell_next() end
return 1
