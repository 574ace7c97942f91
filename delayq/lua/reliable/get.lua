-- get: look at messages.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- ARGV[...]  id  of each message
--
-- Returns for each {state, priority, moment, attempt, body, error}, or nil when there is none. The moment, microseconds,
-- is the due time, or the end of the lease.
-- include: clock
-- include: queue

local now = now_us()
local reply = {}
for i, id in ipairs(ARGV) do reply[i] = describe(id, now) end
return reply
