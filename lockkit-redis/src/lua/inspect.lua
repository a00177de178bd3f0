-- Looks, and changes nothing.
-- Returns how many wait, the value or nil, what is left of it in ms, and for each shared holder or permit what is left of
-- its lease and its value. The dead are left out: those of a lock that is free stay until somebody has to queue up.
local is_over = holder() and left() <= 0
local waiting = 0
local waiters = call('ZRANGE', QUEUE, 0, -1, 'WITHSCORES')
for i = 1, #waiters, 2 do
  local mode, _, text = about(waiters[i])
  if mode and is_alive(client_of(text), waiters[i + 1]) then waiting = waiting + 1 end
end
local shown = { waiting, not is_over and value, value and not is_group() and left() or -2 }
if is_group() then
  local entries = call('ZRANGE', HOLDERS, 0, -1, 'WITHSCORES')
  for i = 1, #entries, 2 do
    local _, _, text = about(entries[i])
    if text and entries[i + 1] - now > 0 then
      shown[#shown + 1] = entries[i + 1] - now
      shown[#shown + 1] = text
    end
  end
end
return shown
