-- ARGV: 1 the marker with which it has a vote   2 the value   3 ttl in ms   4 the first token   5 the last   6 mode: x or s
--       7 since when it asks, in us of its clock   8 `try`; `wait`; `again` if it may be listed as waiting; or `repair` if a
--       majority holds for it, so that whoever waits has to wait for that
if ARGV[6] == 'x' and ARGV[8] ~= 'again' then
  -- As few calls as can be: this is what a lock costs that nobody contends for.
  local known = call('MGET', 'lockkit#redlock', FENCE)
  if known[1] ~= ARGV[1] then return 0 end
  if call('SET', LOCK, ARGV[2], 'NX', 'PX', ARGV[3]) then
    return raise(ARGV[4], ARGV[5], known[2])
  end
elseif not has_vote(ARGV[1]) then
  return 0
end
