-- Ends the hold that has this token, and tells its holder. Returns 1 if there was one. Returns -1 if the holder may have another
-- token by now and not have published it.
-- ARGV: 1 the token   2 given if that is not to be waited for
local token = tonumber(ARGV[1])
local ended
drop_expired_holders()
if exclusive_holder() then
  local published = token_of(value)
  -- A hold that was passed on within its client has one of the tokens that were reserved with the first.
  local passed_on = published and published < token and token < published + string.match(value, '^%S+ (%d+) ')
  if passed_on and not ARGV[2] then return -1 end
  if published == token or passed_on then
    ended = string.sub(value, 9)
    call('DEL', LOCK)
    value = false
  end
elseif is_group() then
  for _, owner in ipairs(call('ZRANGE', HOLDERS, 0, -1)) do
    local _, _, record = entry_of(owner)
    if record and token_of(record) == token then
      ended = record
      call('ZREM', HOLDERS, owner)
      call('HDEL', ENTRIES, owner)
      if call('EXISTS', HOLDERS) == 0 then
        call('DEL', LOCK)
        value = false
      end
      break
    end
  end
end
if ended then
  publish(string.sub(ended, 1, 32), client_of(ended), 0)
else
  check_writable()
end
grant_from_queue()
return ended and 1 or 0
