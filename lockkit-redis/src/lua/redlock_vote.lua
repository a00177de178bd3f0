-- Returns 1: granted, with these tokens; the counter as a text: granted, but without the tokens; 0: no vote; or
-- {ms left of the lease or -1, the holder: an owner, `others` or `foreign`}.
local alone = ARGV[6] == 'x'
local list = alone and WRITERS or READERS
local repairs = ARGV[8] == 'repair'
drop_ended()
local fits = not value or (repairs and kept_for())
if alone then
  fits = fits or holder() == me or kept_for() == me
else
  fits = fits or kept_for() == 's'
    or (is_shared() and (repairs or call('ZSCORE', HOLDERS, me) or not is_writer_before(ARGV[7])))
end
if fits then
  if alone then
    call('SET', LOCK, ARGV[2], 'PX', ARGV[3])
  else
    share(me, ARGV[2], ARGV[3])
  end
  if ARGV[8] == 'again' then forget_waiter(waiter(ARGV[2])) end
  return raise(ARGV[4], ARGV[5], call('GET', FENCE))
end
if waits then keep_waiting(list, waiter(ARGV[2])) end
return { left(), holder() or (is_shared() or kept_for()) and 'others' or 'foreign' }
