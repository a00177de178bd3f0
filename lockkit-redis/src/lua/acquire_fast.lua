-- Grants a free lock. Nobody waits for one: while somebody does, the key is there.
-- ARGV: 1 the value, with %d for the token   2 how many tokens that names   3 ttl in ms   4 mode: x, s, p<permits>
--       5 how many tokens if the lock is contended   6 `wait`, or `try` to stay out of the queue
--       7 given for an exclusive lock, by a claim that cannot be in the queue
-- Returns the first token.
if not value and ARGV[7] then
  local time = call('TIME')
  local first = draw_tokens(ARGV[2], time[1] * 1000000 + time[2])
  call('SET', LOCK, string.format(ARGV[1], first), 'PX', ARGV[3])
  return first
end
