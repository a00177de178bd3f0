-- Finds the hold that has this token: its record, what is left of its lease in ms, and whether it may have a later token by now.
-- ARGV: 1 the token
local token = tonumber(ARGV[1])
local record, left, is_passed_on
drop_expired_holders()
if exclusive_holder() then
  -- A hold that was passed on within its client has one of the tokens that were reserved with the first, and may not have published it.
  local first = token_of(value)
  if first and first <= token and token < first + string.match(value, '^%S+ (%d+) ') then
    record, left, is_passed_on = string.sub(value, 9), lease_left(), first < token
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
local holder = record and string.sub(record, 1, 32)
if not record then check_writable() end
