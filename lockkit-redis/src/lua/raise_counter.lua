-- Raises the token counter to the server's clock. Returns the counter.
local time = redis.call('TIME')
local micros = time[1] * 1000000 + time[2]
local last = tonumber(redis.call('GET', 'lockkit#fence') or 0)
if last < micros then
  last = micros
  redis.call('SET', 'lockkit#fence', string.format('%d', last))
end
return last
