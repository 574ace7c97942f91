-- outcome: look for the end of a message.
--
-- Keys:
--   messages       see include/queue.lua
--   records        see include/records.lua
--   dead           ZSET  names of dead letters, scored by their time of death, microseconds
--   dead_messages  HASH  name to the reason, as JSON, newline, body: see include/letters.lua
-- Arguments:
--   id  text  of the message
-- Roles: admin, dashboard
-- Repeatable: yes
--
-- Returns {now, keep, live, record, moment, letter, died, ends, message}: see include/outcome.lua.
-- message: {state, priority, moment, attempt, body, error}, as get.lua returns it, if it is alive.
-- include: clock
-- include: leases
-- include: queue
-- include: records
-- include: outcome
-- include: at_rest

local now = now_us()
local reply, message = find_outcome(id, now)
reply[9] = describe_by_id(id, message, now)
return reply
