-- get: look at messages.
--
-- Keys:
--   messages  see include/queue.lua
--   settings  HASH  see include/settings.lua
-- Arguments:
--   id...  text  of each message
-- Roles: admin, dashboard
-- Repeatable: yes
--
-- Returns for each message {state, priority, moment, attempt, body, error}, or nil if there is
-- none. moment: the due time, or the end of the lease, microseconds.
-- include: clock
-- include: leases
-- include: queue
-- include: at_rest

local now = now_us()
local reply = {}
for i, id in ipairs(ids) do reply[i] = describe_by_id(id, find_message(id, now), now) end
return reply
