-- Asks the holder of the hold that has this token to give it up, and tells its client. From then on no renewal prolongs that hold; if the
-- holder has not published the token, the mark waits for the renewal which does. Returns ms left of its lease, or -1 if there is no such
-- hold. Idempotent.
if record then
  -- First: a server without memory refuses HSET, but not within a script that has begun to write.
  check_writable()
  call('HSET', REVOKED, holder, ARGV[1])
  extend(REVOKED, left + GRACE)
  publish(holder, client_of(record), 0)
end
grant_from_queue()
return record and math.max(0, left) or -1
