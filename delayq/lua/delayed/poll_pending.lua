-- poll_pending: take pending messages out, due or not: the oldest, or without an ordered list those that are due first.
--
-- KEYS[1]  timeout     ZSET  records, scored by due time, ms
-- KEYS[2]  ordered     LIST  the same records in offer order
-- KEYS[3]  quarantine  LIST  records that nobody can read
-- ARGV[1]  limit       int     take at most this many
-- ARGV[2]  listed      0 or 1  whether the ordered list is kept
--
-- Returns the payloads.
-- include: clock
-- include: record
-- include: forget

redis.call('LLEN', KEYS[3])
local limit = tonumber(ARGV[1])
local records
if ARGV[2] == '1' then
  redis.call('ZCARD', KEYS[1])
  records = redis.call('LPOP', KEYS[2], limit) or {}
  if #records > 0 then redis.call('ZREM', KEYS[1], unpack(records)) end
else
  redis.call('LLEN', KEYS[2])
  records = redis.call('ZRANGE', KEYS[1], 0, limit - 1)
  if #records > 0 then redis.call('ZREMRANGEBYRANK', KEYS[1], 0, #records - 1) end
  forget_all(KEYS[2], records, now_us())
end
local payloads, poison = {}, {}
for _, record in ipairs(records) do
  local payload = payload_of(record)
  if payload then payloads[#payloads + 1] = payload else poison[#poison + 1] = record end
end
if #poison > 0 then redis.call('RPUSH', KEYS[3], unpack(poison)) end
return payloads
