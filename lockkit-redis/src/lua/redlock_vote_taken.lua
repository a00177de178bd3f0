-- Where another holds exclusively, nobody else has to be looked at.
if is_behind then
  keep_waiting(WRITERS, waiter(ARGV[2]))
  return { call('PTTL', LOCK), is_behind }
end
