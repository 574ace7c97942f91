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

local workers_and_scores = redis.call('ZRANGEBYSCORE', workers, now_us(), '+inf', 'WITHSCORES', 'LIMIT', offset, limit)
local reply = {}
for at = 1, #workers_and_scores, 2 do
  reply[at] = workers_and_scores[at + 1]
  reply[at + 1] = redis.call('HGET', worker_facts, workers_and_scores[at]) or ''
end
return reply
