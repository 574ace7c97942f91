-- nack: offer a leased message again, due after a delay.
--
-- KEYS[1]  leases   ZSET     tokens of what is out, scored by the end of their lease, ms
-- KEYS[2]  leased   HASH     token to payload
-- KEYS[3]  timeout  ZSET     records, scored by due time, ms
-- KEYS[4]  ordered  LIST     the same records in offer order
-- KEYS[5]  channel  CHANNEL  where a new head is announced: its due time, ms
-- ARGV[1]  token     text    names the payload that was handed out
-- ARGV[2]  delay_us  int     how long from now, microseconds
-- ARGV[3]  listed    0 or 1  whether the ordered list is kept
--
-- Returns the due time in ms, or -1 when it is not out under that token any more.
-- include: clock
-- include: record
-- include: store

local now = now_us()
local delay = tonumber(ARGV[2])
local due = delay and delay >= 0 and due_ms(now, delay)
if not due or due > MAX_MS then return redis.error_reply('DELAYQ_DELAY delay out of range') end
local payload = redis.call('HGET', KEYS[2], ARGV[1])
redis.call('LLEN', KEYS[4])
if not payload or not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return -1 end
announce(KEYS[3], KEYS[5], {due})
-- First the write that frees memory: then a full server accepts the rest.
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
store(KEYS[3], KEYS[4], ARGV[3] == '1', now, {due}, {payload})
return due
