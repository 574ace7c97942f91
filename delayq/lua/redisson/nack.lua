-- nack: offer a leased message again, due after a delay.
--
-- Keys:
--   leases   ZSET     tokens of the leases, scored by the end of the lease, ms
--   leased   HASH     token to payload
--   timeout  ZSET     records, scored by due time, ms
--   ordered  LIST     the same records in offer order
--   channel  CHANNEL  where a new head is announced: its due time, ms
-- Arguments:
--   token     text    of the payload
--   delay_us  int     time from now, microseconds
--   listed    0 or 1  whether the ordered list is kept
-- Roles: consumer
-- Repeatable: no
--
-- Returns the due time in ms, or -1 if nothing is leased under that token any more.
-- include: clock
-- include: record
-- include: store
-- include: lease

local now = now_us()
local due = due_ms(now, delay_us)
if not due or due > MAX_MS then return redis.error_reply('DELAYQ_DELAY delay out of range') end
local payload = redis.call('HGET', leased, token)
redis.call('LLEN', ordered)
if not payload or not redis.call('ZSCORE', leases, token) then return -1 end
announce(due)
demand_ends()
store(listed == '1', now, {due, payload}, 2)
-- Last, so that nothing is lost if a write before is refused.
redis.call('ZREM', leases, token)
redis.call('HDEL', leased, token)
return due
