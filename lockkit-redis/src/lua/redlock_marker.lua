-- What this process is to the deployment, written down beside its data.
-- ARGV: 1 the process   2 the deployment's longest ttl in ms   3 `look`; `trust` if data of an earlier process are
--       complete; or the beginning of the quarantine that is over, or that keeps out nobody, as it was told before
-- Returns -1 if it has a vote; when its quarantine began, in ms of its clock; or a text: the longest ttl that others go by.
local MARKER = 'lockkit#redlock'
local call = redis.call
local mine = ARGV[1] .. ' ' .. ARGV[2]
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local marker = call('GET', MARKER) or ''
if marker == mine then return -1 end
local new, run_id, longest, since = string.match(marker, '^(%-?)(%S+) (%d+) ?(%d*)$')
-- For those who have not watched it themselves. A clock that was set back does not make it longer than it is.
local left = new == '-' and math.min((tonumber(since) or now) + longest - now, tonumber(longest))
if longest and longest ~= ARGV[2] then
  -- A quarantine that is too short begins anew, and so does one that all who go by as much have left to itself.
  if not left or (left > 0 and tonumber(longest) > tonumber(ARGV[2])) then return longest end
  run_id = nil
end
-- One that was emptied in quarantine has begun another, which nobody has watched for long enough.
local is_over = left and run_id == ARGV[1] and (ARGV[3] == since or left <= 0)
if is_over or (run_id and not left and ARGV[3] == 'trust') then
  call('SET', MARKER, mine)
  return -1
end
if run_id ~= ARGV[1] then
  since = string.format('%d', now)
  call('SET', MARKER, '-' .. mine .. ' ' .. since)
end
return tonumber(since)
