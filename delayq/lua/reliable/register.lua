-- register: keep a list of the clients that work on the queue.
--
-- Keys:
--   workers       ZSET  clients, scored by the moment until which they count, microseconds
--   worker_facts  HASH  client to what it reports of itself, as JSON
-- Arguments:
--   worker     text  the client
--   counts_us  int   how long it counts if it does not report again, microseconds; 0 if it leaves
--   facts      text  JSON
-- Roles: consumer
-- Repeatable: yes
--
-- Returns the server's time, microseconds.
-- include: clock

local now = now_us()
local gone = redis.call('ZRANGEBYSCORE', workers, '-inf', now, 'LIMIT', 0, 10)
local stays = tonumber(counts_us) > 0
if not stays then gone[#gone + 1] = worker end
-- Refused before the first write if it is of a foreign type.
redis.call('HLEN', worker_facts)
if #gone > 0 then
  redis.call('ZREM', workers, unpack(gone))
  redis.call('HDEL', worker_facts, unpack(gone))
end
if stays then
  redis.call('ZADD', workers, now + tonumber(counts_us), worker)
  redis.call('HSET', worker_facts, worker, facts)
  -- Both go with the last of their clients.
  local stays_ms = math.max(redis.call('PTTL', workers), math.ceil(tonumber(counts_us) / 1000))
  redis.call('PEXPIRE', workers, stays_ms)
  redis.call('PEXPIRE', worker_facts, stays_ms)
end
return now
