-- What this process is to the deployment, written down beside its data.
-- ARGV: 1 the process   2 the deployment's longest ttl in ms   3 `look`; `trust` if data of an earlier process are
--       complete; `admit` if it has been in quarantine for long enough; `new` if nothing has ever been granted
-- Returns -1 if it has a vote, for how many ms it has none, or a text: the longest ttl that others go by.
local MARKER = 'lockkit#redlock'
local call = redis.call
local mine = ARGV[1] .. ' ' .. ARGV[2]
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local marker = call('GET', MARKER) or ''
if marker == mine then return -1 end
local new, run_id, longest, since = string.match(marker, '^(%-?)(%S+) (%d+) ?(%d*)$')
if longest and longest ~= ARGV[2] then return longest end
-- One that was emptied in quarantine begins it anew.
local is_over = ARGV[3] == 'admit' and run_id == ARGV[1]
if is_over or ARGV[3] == 'new' or (ARGV[3] == 'trust' and new == '') then
  call('SET', MARKER, mine)
  return -1
end
if run_id ~= ARGV[1] then
  call('SET', MARKER, string.format('-%s %d', mine, now))
  return tonumber(ARGV[2])
end
-- For those who have not watched it themselves. A clock that was set back does not make it longer than it is.
local left = math.min(since + ARGV[2] - now, tonumber(ARGV[2]))
if left > 0 then return left end
call('SET', MARKER, mine)
return -1
