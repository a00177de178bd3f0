-- Free, and nobody waits: as long as somebody does, the key is there.
-- ARGV: 1 the value, with %d for the token   2 how many tokens that says   3 ttl in ms   4 mode: x, s, p<permits>
--       5 how many tokens if it is not had at once   6 `wait`, or `try` if it keeps out of the queue
--       7 there if it is alone that it is to be held, by a claim that has no place in the queue
-- Returns the first token.
if not value and ARGV[7] then
  local time = call('TIME')
  local first = draw(ARGV[2], time[1] * 1000000 + time[2])
  call('SET', LOCK, string.format(ARGV[1], first), 'PX', ARGV[3])
  return first
end
