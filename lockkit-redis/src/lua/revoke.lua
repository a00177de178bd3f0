-- Ends the hold that has this token, and tells its holder. Returns 1 if there was one, -1 if the
-- holder has not said its token yet.
-- ARGV: 1 the token
local token = tonumber(ARGV[1])
local function has(text)
  local tokens, first = string.match(text, '^%S+ (%d+) (%d+) ')
  return tokens and tonumber(first) <= token and token < first + tokens
end
local ended
drop_ended()
if holder() and string.find(value, '^%S+ %d+ %- ') then return -1 end
if holder() and has(string.sub(value, 9)) then
  ended = string.sub(value, 9)
  call('DEL', LOCK)
  value = false
elseif is_group() then
  for _, owner in ipairs(call('ZRANGE', HOLDERS, 0, -1)) do
    local _, _, text = about(owner)
    if text and has(text) then
      ended = text
      call('ZREM', HOLDERS, owner)
      call('HDEL', ABOUT, owner)
      if call('EXISTS', HOLDERS) == 0 then
        call('DEL', LOCK)
        value = false
      end
      break
    end
  end
end
if ended then wake(string.sub(ended, 1, 32), client_of(ended), 0) end
serve()
return ended and 1 or 0
