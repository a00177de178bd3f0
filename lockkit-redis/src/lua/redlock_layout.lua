-- The keys of a lock, and the clock.
--
--   <lock>                     lockkit:<record>: one exclusive holder
--                              lockkit#shared: the holders in `holders`
--                              lockkit#next <owner>, lockkit#next s: free, but kept for a moment for a waiter that was
--                              woken, or for readers
--                              anything else: a foreign client's hold
--   <own>holders:{<lock>}   shared holders: owner -> end of the lease in ms of the server's clock
--   <own>about:{<lock>}     shared holders: owner -> lockkit:<record>
--   <own>writers:{<lock>}, <own>readers:{<lock>}
--                              waiters: "<owner> <client>" -> since when, in us of the client's clock
--   <own>asked:{<lock>}     the same waiters -> when they asked last, in ms of the server's clock
--   <own>revoked:{<lock>}   holders that were asked to give up their hold, or whose hold was ended by force: owner -> the
--                              first token of that hold
--   <own>fence:{<lock>}     the last fencing token, for weeks after its last use
--   <own>redlock            the marker: "<run id> <max ttl>", or "-<run id> <max ttl> <since>" in quarantine
--   <own>client:<client>    the channel of a client's wake-ups
--
-- <own> is "<namespace>:lockkit#", or "lockkit#" without a namespace. <record> is "<owner> <tokens> <first token> <client> <label>",
-- whose client is the whole name <own>client:<client>.
local WRITERS, READERS = OWN .. 'writers:{' .. LOCK .. '}', OWN .. 'readers:{' .. LOCK .. '}'
local ASKED = OWN .. 'asked:{' .. LOCK .. '}'
-- Texts, which no call has to format.
local KEPT = '100' -- how long a free lock is kept for a waiter that was woken, in ms
local WAITED = '10000' -- how long a waiter counts after it asked last, in ms

local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function waiter(text)
  local owner, client = string.match(text, '^lockkit:(%S+) %S+ %S+ (%S+)')
  return owner .. ' ' .. client
end

-- Puts a waiter on its list, or keeps it there.
local function keep_waiting(list, who)
  call('ZADD', list, ARGV[7], who)
  call('ZADD', ASKED, now, who)
  call('PEXPIRE', list, WAITED)
  call('PEXPIRE', ASKED, WAITED)
end

-- Takes a waiter off its list, and more if need be, and tells its client. That is a hint: it returns to the list if it asks in vain.
-- Returns the owner if somebody received it.
local function wake(list, who, ...)
  call('ZREM', list, who, ...)
  call('ZREM', ASKED, who, ...)
  local owner, client = string.match(who, '^(%S+) (%S+)$')
  return call('PUBLISH', client, owner .. ' 1 ' .. LOCK) > 0 and owner
end
