-- ARGV: 1 the process that is asked   2 the value   3 ttl in ms   4 the first token   5 the last   6 mode: x or s
--       7 since when it asks, in us of its clock   8 `try`, `wait`, or `again` if it may be listed as waiting
if not has_vote(ARGV[1]) then return 0 end
if ARGV[6] == 'x' and ARGV[8] ~= 'again' and call('SET', LOCK, ARGV[2], 'NX', 'PX', ARGV[3]) then
  return raise(ARGV[4], ARGV[5])
end
