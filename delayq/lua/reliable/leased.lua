-- leased: find out which of these messages workers have, and until when.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- ARGV[...]  id  of each message
--
-- Returns for each the end of its lease, microseconds; nil when no worker has it.
-- include: clock
-- include: queue

local now = now_us()
local reply = {}
for i = 1, #ARGV do reply[i] = false end
local leases = redis.call('HMGET', KEYS[12], unpack(ARGV))
for _, at in ipairs(live_sets()) do
  for i, moment in ipairs(redis.call('ZMSCORE', KEYS[at], unpack(ARGV))) do
    if moment and tonumber(moment) > now and lease_of(leases[i]) then reply[i] = number(math.min(tonumber(moment), MOST)) end
  end
end
return reply
