-- ARGV: 1 the marker with which it has a vote   2 the value   3 ttl in ms   4 the first token   5 the last   6 mode: x or s
--       7 since when it asks, in us of its clock   8 `try`; `wait`; `again`, if it may be listed as a waiter; or `repair`, if it
--       holds a majority, so that it goes before waiters
local me = string.sub(ARGV[2], 9, 40)
local waits = ARGV[8] == 'wait' or ARGV[8] == 'again'
local is_behind
if ARGV[6] == 'x' then
  -- As few calls as possible: an uncontended lock ends here, and so does each that is kept for a writer.
  local votes, fence, found = read(ARGV[1])
  if not votes then return 0 end
  if not found and ARGV[8] ~= 'again' and call('SET', LOCK, ARGV[2], 'NX', 'PX', ARGV[3]) then
    return raise(ARGV[4], ARGV[5], fence)
  end
  if found == 'lockkit#next ' .. me then
    -- It was woken, and has left the list.
    call('SET', LOCK, ARGV[2], 'PX', ARGV[3])
    return raise(ARGV[4], ARGV[5], fence)
  end
  local other = found and string.match(found, '^lockkit:(%x+) ')
  is_behind = other ~= me and other
  if is_behind and not waits then return { call('PTTL', LOCK), other } end
  -- The slow path reads what is missing again.
  value = found or nil
elseif not has_vote(ARGV[1]) then
  return 0
end
