-- poll_pending: take the oldest pending messages out, due or not, in offer order.
--
-- KEYS[1]  timeout     ZSET  records, scored by due time, ms
-- KEYS[2]  ordered     LIST  the same records in offer order
-- KEYS[3]  quarantine  LIST  records that nobody can read
-- ARGV[1]  limit       int   take at most this many
--
-- Returns the payloads.
-- include: record

redis.call('LLEN', KEYS[3])
local payloads, poison = {}, {}
for _, record in ipairs(redis.call('LPOP', KEYS[2], tonumber(ARGV[1])) or {}) do
  redis.call('ZREM', KEYS[1], record)
  local payload = payload_of(record)
  if payload then payloads[#payloads + 1] = payload else poison[#poison + 1] = record end
end
if #poison > 0 then redis.call('RPUSH', KEYS[3], unpack(poison)) end
return payloads
