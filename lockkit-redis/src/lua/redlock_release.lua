-- Ends the owner's hold, and its wait unless it yields. Returns 1 if it held.
local me = owner_of(ARGV[1])
if held == 1 then
  -- It held exclusively: the key goes to the next waiter.
  value = false
  forget_waiter(waiter(ARGV[1]))
  if not tell_next() then call('DEL', LOCK) end
  return 1
end
drop_ended()
if holder() == me then
  held = call('DEL', LOCK)
  value = false
elseif unshare(me) then
  held = 1
end
if ARGV[2] == 'end' then
  if kept_for() == me then
    call('DEL', LOCK)
    value = false
  end
  forget_waiter(waiter(ARGV[1]))
  if not value then
    tell_next()
  elseif is_shared() or kept_for() == 's' then
    -- A writer that waited no longer keeps them out.
    wake_readers()
  end
end
return held
