-- Puts a newcomer behind the last in the queue of a lock that another holds exclusively, or says that it is taken. Only a repeated
-- request goes on, to find out who before it has died. Nothing is written unless all of it is.
local me = string.sub(ARGV[1], 9, 40)
local record = me .. ' ' .. ARGV[5] .. string.match(ARGV[1], '^%S+ %d+(.*)$')
local holder = value and string.match(value, '^lockkit[:+](%x+) ')
if holder and holder ~= me then
  local waited_for = string.sub(value, 8, 8) == '+'
  lease = call('PTTL', LOCK) - (waited_for and GRACE or 0)
  if ARGV[6] == 'try' and lease > 0 then
    check_writable()
    return { -1, lease, 0 }
  end
  local last = call('ZREVRANGE', QUEUE, 0, 0, 'WITHSCORES')[2]
  -- Who waits to share may be among shared holders that no longer count. To drop them later would drop its entry as a waiter.
  local fits = lease > 0 and waited_for == (last ~= nil) and (ARGV[4] == 'x' or call('EXISTS', HOLDERS) == 0)
  -- Behind the last, also when the clock went back.
  local arrival = math.max((last or 0) + 1, micros)
  if fits and call('ZADD', QUEUE, 'NX', string.format('%d', arrival), me) == 1 then
    call('HSET', ENTRIES, me, ARGV[4] .. ' ' .. ARGV[3] .. ' ' .. record)
    -- The first to come in a minute is enough, and each while the last is ahead of the clock. No group needs these keys for longer.
    if not last or math.floor(last / 6e7) ~= math.floor(micros / 6e7) then
      call('PEXPIRE', QUEUE, IDLE)
      call('PEXPIRE', ENTRIES, IDLE)
    end
    if not last then
      call('SET', LOCK, 'lockkit+' .. string.sub(value, 9), 'PX', lease + GRACE)
      return { 0, lease, 0 }
    end
    -- With so short a lease, all who are not the head ask at the same time.
    return { lease > HANDOFF_TTL and call('ZCARD', QUEUE) - 1 or 1, lease, 0 }
  end
end
