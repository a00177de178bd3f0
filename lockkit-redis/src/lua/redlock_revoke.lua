-- Ends the hold with this token, and tells its holder. Returns 1 if there was one.
-- ARGV: 1 the token
local token = tonumber(ARGV[1])
local function has(text)
  local tokens, first = string.match(text, '^lockkit:%S+ (%d+) (%d+) ')
  return tokens and tonumber(first) <= token and token < first + tokens
end
local ended
drop_ended()
if holder() and has(value) then
  ended = value
  call('DEL', LOCK)
  value = false
elseif is_shared() then
  for _, owner in ipairs(call('ZRANGE', HOLDERS, 0, -1)) do
    local text = call('HGET', ABOUT, owner)
    if text and has(text) then
      ended = text
      unshare(owner)
      break
    end
  end
end
if not ended then return 0 end
local owner, client = string.match(ended, '^lockkit:(%S+) %S+ %S+ (%S+)')
call('PUBLISH', 'lockkit#client:' .. client, owner .. ' 0 ' .. LOCK)
if not value then tell_next() end
return 1
