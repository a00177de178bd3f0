-- Hands an exclusive hold to the head of the queue, if that waits for it exclusively. Whatever needs more is left to what follows,
-- which finds the lock and the queue as they were.
-- ARGV: 1 the value, known up to the owner at least
local me = string.sub(ARGV[1], 9, 40)
if value and string.sub(value, 1, 41) == 'lockkit+' .. me .. ' ' then
  lease = call('PTTL', LOCK) - GRACE
  local waiters = call('ZRANGE', QUEUE, 0, 1, 'WITHSCORES')
  local head, second = waiters[1], waiters[3]
  -- The second has to be alive. Its entry is there, since it is younger than that of the head.
  local fits = lease > 0 and head and head ~= me and second ~= me and (not second or micros - waiters[4] < ALIVE_FOR * 1000)
  local entry = fits and call('HGET', ENTRIES, head) or ''
  local ttl, record, tokens, client = string.match(entry, '^x (%d+) (%S+ (%d+) %S+ (%S+).*)$')
  -- With a shorter lease, the second would have to be told. No tokens may be left.
  local may_go, first = ttl and tonumber(ttl) >= HANDOFF_TTL
  if may_go then
    may_go, first = pcall(draw_tokens, tokens, micros)
  end
  if may_go then
    -- Before the push: nobody may be told of a hold that cannot be written. A try may have been granted beside the owner's place in
    -- the queue.
    call('ZREM', QUEUE, head, me)
    local takes_hand_offs = string.sub(client, -1) == 't'
    -- Only at this server, as all pushes.
    redis.set_repl(redis.REPL_NONE)
    local receivers = redis.pcall('PUBLISH', client, head .. ' ' .. (takes_hand_offs and string.format('0:%d', first) or 0) .. ' ' .. LOCK)
    redis.set_repl(redis.REPL_ALL)
    if type(receivers) == 'number' and receivers > 0 then
      local ms = HANDOFF_TTL + (second and GRACE or 0)
      call('SET', LOCK, (second and 'lockkit+' or 'lockkit:') .. string.format(record, first), 'PX', ms)
      return call('HDEL', ENTRIES, head)
    end
    call('ZADD', QUEUE, waiters[2], head)
    if not second then call('PEXPIRE', QUEUE, IDLE) end
  end
end
