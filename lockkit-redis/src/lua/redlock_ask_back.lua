-- Asks the holder of the hold to give it up. Returns ms left of its lease; -1 if there is no such hold; or -2 if there is none and this
-- process has no vote, and may have lost it. Idempotent.
if not found then return has_vote(ARGV[2]) and -1 or -2 end
-- A server out of memory refuses HSET, unless the script has written before.
call('DEL', OWN .. 'nowhere')
mark()
return math.max(0, ms)
