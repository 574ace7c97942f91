-- offer: store messages, each due after a delay of its own or at a moment.
--
-- Keys:
--   timeout  ZSET     records, scored by due time, ms
--   ordered  LIST     the same records in offer order
--   channel  CHANNEL  where a new head is announced: its due time, ms
-- Arguments:
--   listed       0 or 1  whether the ordered list is kept
--   when...      text    of each message: microseconds from now; or "@" and the moment, microseconds
--   payload...   bytes   of each message
-- Roles: producer
-- Repeatable: no
-- Stores: yes
--
-- Returns {length_bytes, now, id}: the server's time in microseconds, and the id of the first
-- message. A receipt needs these to name its record again: each further message has the next id.
-- include: clock
-- include: record
-- include: store

local now = now_us()
local first = math.huge
for at = FIRST, #ARGV, STRIDE do
  local due = due_ms(now, ARGV[at + WHEN])
  if not due or due > MAX_MS then return redis.error_reply('DELAYQ_DELAY delay out of range') end
  ARGV[at + WHEN] = due
  if due < first then first = due end
end
announce(first)
return {length_bytes(), now, store(listed == '1', now, ARGV, FIRST + PAYLOAD)}
