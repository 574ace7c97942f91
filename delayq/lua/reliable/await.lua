-- await: look for the end of a message, and ask to be notified of it if that is yet to come.
--
-- Keys:
--   messages       see include/queue.lua
--   records        see include/records.lua
--   dead           ZSET  names of dead letters, scored by their time of death, microseconds
--   dead_messages  HASH  name to the reason, as JSON, newline, body: see include/letters.lua
--   awaited        ZSET  ids whose end clients wait for, scored by the end of that, microseconds
-- Arguments:
--   id      text  of the message
--   for_us  int   how long the client waits before it asks again, and a while longer, microseconds;
--                 0 if it does not wait
-- Roles: producer
-- Repeatable: yes
--
-- Returns {now, keep, live, record, moment, letter, died, ends}: see include/outcome.lua.
-- include: clock
-- include: leases
-- include: queue
-- include: records
-- include: outcome
-- include: await
-- include: at_rest

local now = now_us()
local outcome = find_outcome(id, now)
for_us = tonumber(for_us)
if outcome[3] == 1 and outcome[2] > 0 and for_us > 0 then await_end(id, for_us, now) end
return outcome
