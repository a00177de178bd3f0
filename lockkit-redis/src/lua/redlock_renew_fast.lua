-- ARGV: 1 the marker with which it has a vote   2 the value   3 ttl in ms   4 the first token   5 the last   6 mode: x or s
if ARGV[6] == 'x' and call('GET', LOCK) == ARGV[2] and call('EXISTS', OWN .. 'revoked:{' .. LOCK .. '}') == 0 then
  keep_counter()
  return call('PEXPIRE', LOCK, ARGV[3])
end
