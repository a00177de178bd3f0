-- Shows who holds and how many wait. Changes nothing.
-- Returns how many wait; the value, or nil; ms left of the lease; and for each member of a group ms left of its lease and its
-- record. Leaves out the dead: those of a free lock stay until somebody has to queue.
local is_over = exclusive_holder() and lease_left() <= 0
local waiting = 0
local waiters = call('ZRANGE', QUEUE, 0, -1, 'WITHSCORES')
for i = 1, #waiters, 2 do
  local mode, _, record = entry_of(waiters[i])
  if mode and is_alive(client_of(record), waiters[i + 1]) then waiting = waiting + 1 end
end
-- A lock's own value is shorter. Whatever else is there may have any length.
local shown = { waiting, not is_over and value and string.sub(value, 1, 4096), value and not is_group() and lease_left() or -2 }
if is_group() then
  local entries = call('ZRANGE', HOLDERS, 0, -1, 'WITHSCORES')
  for i = 1, #entries, 2 do
    local _, _, record = entry_of(entries[i])
    if entries[i + 1] - now > 0 then
      shown[#shown + 1] = entries[i + 1] - now
      -- Somebody holds, also if the record was deleted or evicted.
      shown[#shown + 1] = record or ''
    end
  end
end
return shown
