-- Renews a hold that others wait for, if it lasts no shorter than they were told.
if value == 'lockkit+' .. string.sub(ARGV[1], 9) and call('EXISTS', REVOKED) == 0 and call('EXISTS', QUEUE) == 1 then
  lease = call('PTTL', LOCK) - GRACE
  if lease > 0 and lease <= tonumber(ARGV[2]) then return call('PEXPIRE', LOCK, ARGV[2] + GRACE) end
end
