-- offer: store messages, each due after its own delay.
--
-- KEYS[1]  timeout  ZSET     records, scored by due time, ms
-- KEYS[2]  ordered  LIST     the same records in offer order
-- KEYS[3]  channel  CHANNEL  where a new head is announced: its due time, ms
-- ARGV[1]  listed   0 or 1   whether the ordered list is kept
-- ARGV[...]  delay_us, payload  for each message
--
-- Returns {length_bytes, id, due_ms, id, due_ms, ...}: a receipt needs these to name its record again.
-- include: clock
-- include: record
-- include: store

local now = now_us()
local dues, payloads = {}, {}
for i = 2, #ARGV, 2 do
  local delay = tonumber(ARGV[i])
  local due = delay and delay >= 0 and due_ms(now, delay)
  if not due or due > MAX_MS then return redis.error_reply('DELAYQ_DELAY delay out of range') end
  dues[#dues + 1], payloads[#dues + 1] = due, ARGV[i + 1]
end

announce(KEYS[1], KEYS[3], dues)
local reply = {length_bytes()}
for i, id in ipairs(store(KEYS[1], KEYS[2], ARGV[1] == '1', now, dues, payloads)) do
  reply[#reply + 1] = id
  reply[#reply + 1] = dues[i]
end
return reply
