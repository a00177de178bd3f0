-- Prolongs the owner's lease. Returns 1.
if is_exclusive then
  -- Publishes the token that is in use now. It only rises: a request on another connection may come late.
  if token_of(value) < token_of(record) then value = ARGV[1] end
  lease = ttl
else
  call('ZADD', HOLDERS, now + ttl, me)
end
update_lock_key()
tell_if_shorter(ttl, left)
return 1
