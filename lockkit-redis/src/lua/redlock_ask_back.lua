-- Asks the holder of the hold with this token to give it up, and tells its client. From then on no renewal prolongs that hold here.
-- Returns ms left of its lease; -1 if there is no such hold; or -2 if there is none and this process has no vote, and may have lost
-- it. Idempotent.
-- ARGV: 1 the token   2 the marker with which it has a vote
local token = tonumber(ARGV[1])
local function has(text)
  local tokens, first = string.match(text, '^lockkit:%S+ (%d+) (%d+) ')
  return tokens and tonumber(first) <= token and token < first + tokens
end
local asked, ms
drop_ended()
if holder() and has(value) then
  asked, ms = value, call('PTTL', LOCK)
elseif is_shared() then
  for _, owner in ipairs(call('ZRANGE', HOLDERS, 0, -1)) do
    local text = call('HGET', ABOUT, owner)
    if text and has(text) then
      asked, ms = text, call('ZSCORE', HOLDERS, owner) - now
      break
    end
  end
end
if not asked then return has_vote(ARGV[2]) and -1 or -2 end
local owner, client = string.match(asked, '^lockkit:(%S+) %S+ %S+ (%S+)')
local first = string.match(asked, '^lockkit:%S+ %d+ (%d+) ')
-- A server out of memory refuses HSET, unless the script has written before.
call('DEL', OWN .. 'nowhere')
call('HSET', REVOKED, owner, first)
call('PEXPIRE', REVOKED, math.max(1, ms, call('PTTL', REVOKED)))
call('PUBLISH', client, owner .. ' 0 ' .. LOCK)
return math.max(0, ms)
