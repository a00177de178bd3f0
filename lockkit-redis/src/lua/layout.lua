-- The keys, and the clock. `value` is what was found at the key.
--
--   <lock>                     lockkit:<record>: one exclusive holder, and nobody waits
--                              lockkit+<record>: one exclusive holder, and somebody waits
--                              lockkit#shared, lockkit#permits <n>: a group, whose members are in `holders`
--                              anything else: a foreign client's hold
--                              Expires with the lease, a group's with the longest; or GRACE later while somebody waits.
--                              Whoever comes meanwhile finds it and serves the queue first.
--   <own>holders:{<lock>}   members of the group: owner -> end of the lease in ms of the server's clock
--   <own>queue:{<lock>}     waiters: owner -> arrival in us, made unique
--   <own>about:{<lock>}     waiters and members: owner -> "<mode> <ttl> <record>"
--   <own>revoked:{<lock>}   holders that were asked to give up their hold: owner -> the token of that hold
--   <own>client:<client>    there while a client with waiters is alive; also the name of the channel of its wake-ups. A client
--                              with a `t` in its name takes a hand-off from the push, which names the token then
--   <own>fence              the last fencing token of this namespace
--
-- <own> is "<namespace>:lockkit#", or "lockkit#" without a namespace. <record> is "<owner> <tokens> <first token> <client> <label>",
-- whose client is the whole name <own>client:<client>. A waiter's has %d in the place of the token.
local HOLDERS, QUEUE, ENTRIES = OWN .. 'holders:{' .. LOCK .. '}', OWN .. 'queue:{' .. LOCK .. '}', OWN .. 'about:{' .. LOCK .. '}'
local REVOKED = OWN .. 'revoked:{' .. LOCK .. '}'
local HANDOFF_TTL = 3000 -- how long a lock that was handed off waits for its new holder, in ms
local GRACE = 10000 -- by how much a lock that somebody waits for outlives its lease, in ms
local HEARTBEAT = 2500 -- how often a client looks which of its waiters have become the head of the queue, in ms
local ALIVE_FOR = 10000 -- for how long a waiter counts as alive after its arrival or its client's heartbeat, in ms
local IDLE = 600000 -- after how long unused keys expire, in ms

local time = call('TIME')
local micros = time[1] * 1000000 + time[2]
local now = math.floor(micros / 1000)
-- What is left of the exclusive holder's lease, once it is known.
local lease

-- Fails now if the server refuses to write. One that was demoted must not be believed for as long as a lease lasts. And a script that has
-- not written yet calls this before `grant_from_queue`: nobody may be told of a hold that cannot be written.
local function check_writable() call('DEL', OWN .. 'nowhere') end
