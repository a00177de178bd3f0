-- Ends the owner's hold and its place in the queue, and serves the queue. Returns 1 if the owner held.
local held = 0
drop_expired_holders()
local head
if exclusive_holder() == me then
  held = 1
  value = false
  -- A try may have been granted beside the owner's place in the queue.
  call('ZREM', QUEUE, me)
else
  drop_expired_members()
  if call('ZREM', HOLDERS, me) == 1 then
    held = 1
    if call('EXISTS', HOLDERS) == 0 then value = false end
  end
  head = queue_head()
  call('ZREM', QUEUE, me)
  call('HDEL', ENTRIES, me)
end
by_holder = held == 1
grant_from_queue(nil, head)
if held == 1 and not value then call('DEL', LOCK) end
return held
