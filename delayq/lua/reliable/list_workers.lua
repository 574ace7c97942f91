-- list_workers: list clients that work on the queue.
--
-- Keys:
--   workers       ZSET  clients, scored by the moment until which they count, microseconds
--   worker_facts  HASH  client to what it reports of itself, as JSON
-- Arguments:
--   offset  int  the number of clients to skip
--   limit   int  the largest number to return
-- Roles: admin, dashboard
-- Repeatable: yes
--
-- Returns {until_us, facts, ...} of clients that still count.
-- include: clock

local found = redis.call('ZRANGEBYSCORE', workers, now_us(), '+inf', 'WITHSCORES', 'LIMIT', offset, limit)
local reply = {}
for at = 1, #found, 2 do
  reply[at] = found[at + 1]
  reply[at + 1] = redis.call('HGET', worker_facts, found[at]) or ''
end
return reply
