-- Ends the hold that has this token, and tells its holder. Returns 1 if there was one, -1 if the
-- holder may have another by now and not have said so yet.
-- ARGV: 1 the token   2 there if that is not to be waited for
local token = tonumber(ARGV[1])
local ended
drop_ended()
if holder() then
  -- That of a client of the version before is not known in the first milliseconds of a hold.
  local said = token_of(value)
  -- It may have been passed on within its client, which says so a few milliseconds later, if it is of this version.
  local later = said and said < token and token < said + string.match(value, '^%S+ (%d+) ')
  if later and not ARGV[2] then return -1 end
  if said == token or later then
    ended = string.sub(value, 9)
    call('DEL', LOCK)
    value = false
  end
elseif is_group() then
  for _, owner in ipairs(call('ZRANGE', HOLDERS, 0, -1)) do
    local _, _, text = about(owner)
    if text and token_of(text) == token then
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
if ended then
  wake(string.sub(ended, 1, 32), client_of(ended), 0)
else
  may_write()
end
serve()
return ended and 1 or 0
