-- outcome: look for the end of a message.
--
-- Keys:
--   messages  see include/queue.lua
--   kept      see include/kept.lua
--   dead           ZSET  names of dead letters, scored by their time of death, microseconds
--   dead_messages  HASH  name to the reason, as JSON, newline, body: see include/letters.lua
-- Arguments:
--   id  text  of the message
-- Roles: admin, dashboard
-- Repeatable: yes
--
-- Returns {now, keep, live, record, moment, letter, died}: see include/outcome.lua.
-- include: clock
-- include: leases
-- include: queue
-- include: kept
-- include: outcome

return find_outcome(id, now_us())
