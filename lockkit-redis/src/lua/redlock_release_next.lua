-- Keeps the lock for the first writer, if that counts and no readers wait. Whatever needs more is left to what follows.
if lists == 1 then
  local mine = waiter(ARGV[1])
  local head = call('ZRANGE', WRITERS, '0', '0')[1]
  local asked = head and head ~= mine and call('ZSCORE', ASKED, head)
  -- It may have a place of its own here, where it got the lock by a repair.
  local woken = asked and tonumber(asked) > now - WAITED and wake(WRITERS, head, mine)
  if woken then
    call('SET', LOCK, 'lockkit#next ' .. woken, 'PX', KEPT)
    return 1
  end
end
