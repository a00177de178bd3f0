-- Reads and updates the marker, which says whether this process has a vote.
-- ARGV: 1 the process   2 the deployment's longest ttl in ms   3 `look`; or `trust`, if data of an earlier process are
--       complete; or the beginning of a quarantine to end, as returned before
-- Returns -1 if the process has a vote; the beginning of its quarantine, in ms of its clock; or a text: the longest ttl of
-- other clients.
local MARKER = KEYS[1]
local mine = ARGV[1] .. ' ' .. ARGV[2]
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local marker = call('GET', MARKER) or ''
if marker == mine then return -1 end
local new, run_id, longest, since = string.match(marker, '^(%-?)(%S+) (%d+) ?(%d*)$')
-- The rest of the quarantine by this clock, for clients that did not watch it. Setting the clock back does not prolong it.
local left = new == '-' and math.min((tonumber(since) or now) + longest - now, tonumber(longest))
if longest and longest ~= ARGV[2] then
  -- A quarantine that is too short begins anew. So does a longer one that is over, and whose clients have left.
  if not left or (left > 0 and tonumber(longest) > tonumber(ARGV[2])) then return longest end
  run_id = nil
end
-- A master that was emptied in quarantine is in another one, with another beginning.
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
