-- offer: store messages, each due after its own delay.
--
-- Keys:
--   timeout  ZSET     records, scored by due time, ms
--   ordered  LIST     the same records in offer order
--   channel  CHANNEL  where a new head is announced: its due time, ms
-- Arguments:
--   listed       0 or 1  whether the ordered list is kept
--   delay_us...  int     of each message, microseconds
--   payload...   bytes   of the message
-- Roles: producer
-- Repeatable: no
--
-- Returns {length_bytes, id, due_ms, id, due_ms, ...}: a receipt needs these to name its record
-- again.
-- include: clock
-- include: record
-- include: store

local now = now_us()
local dues, payloads = {}, {}
for at = FIRST, #ARGV, STRIDE do
  local delay = tonumber(ARGV[at + DELAY_US])
  local due = delay and delay >= 0 and due_ms(now, delay)
  if not due or due > MAX_MS then return redis.error_reply('DELAYQ_DELAY delay out of range') end
  dues[#dues + 1], payloads[#dues + 1] = due, ARGV[at + PAYLOAD]
end

announce(dues)
local reply = {length_bytes()}
for i, id in ipairs(store(listed == '1', now, dues, payloads)) do
  reply[#reply + 1] = id
  reply[#reply + 1] = dues[i]
end
return reply
