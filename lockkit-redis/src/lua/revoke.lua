-- Ends the hold that has this token, and tells its holder. Returns 1 if there was one. Returns -1 if the holder may have another
-- token by now and not have published it.
-- ARGV: 2 given if that is not to be waited for
if is_passed_on and not ARGV[2] then return -1 end
if record then
  if is_group() then
    call('ZREM', HOLDERS, holder)
    call('HDEL', ENTRIES, holder)
  end
  if not is_group() or call('EXISTS', HOLDERS) == 0 then
    call('DEL', LOCK)
    value = false
  end
  publish(holder, client_of(record), 0)
end
grant_from_queue()
return record and 1 or 0
