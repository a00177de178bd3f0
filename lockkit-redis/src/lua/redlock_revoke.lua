-- Ends the hold. Returns 1 if there was one; 0 if there is none; or 5 if there is none and this process has no vote, and may have lost it.
if not found then return has_vote(ARGV[2]) and 0 or 5 end
if is_shared() then
  unshare(owner_of(found))
else
  call('DEL', LOCK)
  value = false
end
mark()
if not value then tell_next() end
return 1
