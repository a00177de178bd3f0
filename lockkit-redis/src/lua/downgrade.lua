-- Makes the owner's exclusive hold a shared one, and lets in those at the head of the queue who may share it. Idempotent: a shared hold
-- of the owner is prolonged. It is also the renewal of such a hold, since a server that took over from another may not know of the
-- downgrade. Returns 1.
if is_exclusive then
  -- Of an earlier group, they count no more.
  drop_expired_members()
  -- A try may have been granted beside the owner's place in the queue.
  call('ZREM', QUEUE, me)
  value = 'lockkit#shared'
end
call('ZADD', HOLDERS, now + ttl, me)
call('HSET', ENTRIES, me, 's ' .. ttl .. ' ' .. record)
by_holder = true
-- This updates the key as well.
grant_from_queue()
tell_if_shorter(ttl, left)
return 1
