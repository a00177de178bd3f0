-- Makes another owner that of a hold, at this master. Its lease goes on as it is: it is not prolonged before a majority has the new
-- owner. A hold that missed its downgrade here becomes a shared one. Returns 1: done; 0: not held, and free; 2: another holder, or the
-- hold was ended here; 3: not held, and this process has no vote; 4: held, and its holder was asked to give it up; 5: held by the owner
-- before, as far as a process without a vote can tell. A hold that has not this token is another one.
-- ARGV: 1 the marker with which it has a vote   2 the new value   3 the token   4 the owner before   5 mode: x or s
local me = owner_of(ARGV[2])
drop_ended()
-- The hold of this owner, and what is left of its lease.
local function hold_of(owner)
  if holder() == owner then return value, call('PTTL', LOCK) end
  if ARGV[5] == 's' then return share_of(owner) end
end
local owner = me
local mine, left = hold_of(me)
if not mine then
  owner = ARGV[4]
  mine, left = hold_of(owner)
end
local is_it = mine and has_token(mine, tonumber(ARGV[3]))
if is_it and was_asked(mine) then return 4 end
if mine then
  -- Its data may be old: somebody may have adopted and released the hold since.
  if owner ~= me and not has_vote(ARGV[1]) then return 5 end
  -- The token is that of a message. Whoever changed it could have the counter go on from there.
  if not is_it then return 2 end
  local ms = math.max(1, left)
  -- First: a server without memory refuses SET and ZADD, but not within a script that has begun to write.
  call('PEXPIRE', LOCK, ms)
  if ARGV[5] == 'x' then
    call('SET', LOCK, ARGV[2], 'PX', ms)
  else
    local was_exclusive = not is_shared()
    share(me, ARGV[2], ms)
    if owner ~= me then unshare(owner) end
    if was_exclusive then wake_readers() end
  end
  raise(ARGV[3], ARGV[3], call('GET', FENCE))
  keep_counter()
  return 1
end
-- If it was ended here by force, a renewal of the new owner does not set it again either.
local ended = call('HGET', REVOKED, ARGV[4])
local was_ended = ended and tonumber(ended) <= tonumber(ARGV[3])
if was_ended then
  call('PEXPIRE', REVOKED, math.max(1, call('PTTL', REVOKED)))
  call('HSET', REVOKED, me, ARGV[3])
end
if not has_vote(ARGV[1]) then return 3 end
was_ended = was_ended or call('HGET', REVOKED, me) == ARGV[3]
local to_be_had = not was_ended and (not value or kept_for() or (is_shared() and ARGV[5] == 's'))
return to_be_had and 0 or 2
