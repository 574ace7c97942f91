-- poll_pending: take out pending messages, due or not: the oldest, or without an ordered list those that are due first.
--
-- KEYS[1]  timeout     ZSET    records, scored by due time, ms
-- KEYS[2]  ordered     LIST    the same records in offer order
-- KEYS[3]  quarantine  LIST    records that cannot be read
-- KEYS[4]  leases      ZSET    tokens of what is out under a lease, scored by its end, ms
-- KEYS[5]  leased      HASH    token to what it stands for: see include/lease.lua
-- KEYS[6]  fence       STRING  exists if the caller has given this call up: then it takes nothing
-- ARGV[1]  limit       int     look at no more records than this
-- ARGV[2]  most_bytes  int     and take none beyond this many bytes but the first
-- ARGV[3]  listed      0 or 1  whether the ordered list is kept
-- ARGV[4]  lease_us    int     the records go back after this time, unless the caller confirms that the answer has come
-- ARGV[5]  token       text    the token of their lease, which ends in ":pending"
--
-- Returns {taken, payloads}. taken: how many records left, with those that cannot be read.
-- include: clock
-- include: record
-- include: forget
-- include: lease

redis.call('LLEN', KEYS[3])
redis.call('ZCARD', KEYS[4])
redis.call('HLEN', KEYS[5])
if redis.call('EXISTS', KEYS[6]) == 1 then return {0, {}} end
local now = now_us()
local listed = ARGV[3] == '1'
local limit, most_bytes = tonumber(ARGV[1]), tonumber(ARGV[2])
local records
if listed then
  redis.call('ZCARD', KEYS[1])
  records = redis.call('LRANGE', KEYS[2], 0, limit - 1)
else
  redis.call('LLEN', KEYS[2])
  records = redis.call('ZRANGE', KEYS[1], 0, limit - 1)
end
local out, payloads, poison, bytes = {}, {}, {}, 0
for i, record in ipairs(records) do
  if #payloads > 0 and bytes + #record > most_bytes then break end
  out[i], bytes = record, bytes + #record
  local payload = payload_of(record)
  if payload then payloads[#payloads + 1] = payload else poison[#poison + 1] = record end
end
if #out == 0 then return {0, {}} end
local dues = redis.call('ZMSCORE', KEYS[1], unpack(out))
if listed then redis.call('LPOP', KEYS[2], #out) else forget_all(KEYS[2], out, now) end
redis.call('ZREM', KEYS[1], unpack(out))
if #poison > 0 then redis.call('RPUSH', KEYS[3], unpack(poison)) end
if #payloads > 0 then
  local kept = {ARGV[3]}
  for i, record in ipairs(out) do
    if payload_of(record) then kept[#kept + 1], kept[#kept + 2] = dues[i] or '', record end
  end
  hold(KEYS[4], KEYS[5], ARGV[5], due_ms(now, tonumber(ARGV[4])), pack(kept))
end
return {#out, payloads}
