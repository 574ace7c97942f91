-- poll_pending: take pending messages, due or not: the oldest, or without an ordered list those
-- that are due first.
--
-- Keys:
--   timeout     ZSET    records, scored by due time, ms
--   ordered     LIST    the same records in offer order
--   quarantine  LIST    records that cannot be read
--   leases      ZSET    tokens of the leases, scored by the end of the lease, ms
--   leased      HASH    token to the leased messages: see include/lease.lua
--   fence       STRING  exists if the caller has given this call up: then it takes nothing
-- Arguments:
--   limit       int     look at this many records at most
--   most_bytes  int     and take none beyond this many bytes except the first
--   listed      0 or 1  whether the ordered list is kept
--   lease_us    int     the records go back after this time, unless the caller confirms that the
--                       reply has come
--   token       text    of their lease, which ends in ":pending"
-- Roles: admin
-- Repeatable: no
-- Undone by: give_back
--
-- Returns {taken, payloads}. taken: the number of records that left, including those that cannot be
-- read.
-- include: clock
-- include: record
-- include: forget
-- include: lease

redis.call('LLEN', quarantine)
redis.call('ZCARD', leases)
redis.call('HLEN', leased)
if redis.call('EXISTS', fence) == 1 then return {0, {}} end
local now = now_us()
local is_listed = listed == '1'
limit, most_bytes = tonumber(limit), tonumber(most_bytes)
local records
if is_listed then
  redis.call('ZCARD', timeout)
  records = redis.call('LRANGE', ordered, 0, limit - 1)
else
  redis.call('LLEN', ordered)
  records = redis.call('ZRANGE', timeout, 0, limit - 1)
end
local taken, payloads, unreadable, bytes = {}, {}, {}, 0
for i, record in ipairs(records) do
  if #payloads > 0 and bytes + #record > most_bytes then break end
  taken[i], bytes = record, bytes + #record
  local payload = payload_of(record)
  if payload then payloads[#payloads + 1] = payload else unreadable[#unreadable + 1] = record end
end
if #taken == 0 then return {0, {}} end
local dues = redis.call('ZMSCORE', timeout, unpack(taken))
-- A full server accepts all writes after one that takes no memory. This also tells whether the last
-- one is permitted: until then, each message is in the sorted set.
redis.call('ZREM', timeout, '\255')
if is_listed then redis.call('LPOP', ordered, #taken) else remove_from_list(taken, now) end
if #payloads > 0 then
  local parts = {listed}
  for i, record in ipairs(taken) do
    if payload_of(record) then parts[#parts + 1], parts[#parts + 2] = dues[i] or '', record end
  end
  add_leases({token}, due_ms(now, tonumber(lease_us)), {pack_parts(parts)})
end
if #unreadable > 0 and type(redis.pcall('RPUSH', quarantine, unpack(unreadable))) == 'table' then
  redis.call('ZREM', leases, token)
  redis.call('HDEL', leased, token)
  redis.call('RPUSH', quarantine, unpack(unreadable))
end
redis.call('ZREM', timeout, unpack(taken))
return {#taken, payloads}
