-- advance_delayed: let time go by for a delayed queue: everything that it has stored moves back.
--
-- Keys:
--   timeout  ZSET     records, scored by due time, ms
--   ordered  LIST     the same records in offer order
--   channel  CHANNEL  where a new head is announced: its due time, ms
--   leases   ZSET     tokens of the leases, scored by the end of the lease, ms
-- Arguments:
--   by_us  int  how far, microseconds; rounded up to whole milliseconds
-- Repeatable: no
--
-- Returns 1.

local by = math.ceil(tonumber(by_us) / 1000)
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local head
for _, set in ipairs({timeout, leases}) do
  local first = tonumber(redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')[2])
  if first and (not head or first - by < head) then head = first - by end
end
-- Before anything is written, so that a user who may not publish has changed nothing. Not a moment
-- that has passed: a client that has dealt with it takes it for a late message.
if head then redis.call('PUBLISH', channel, string.format('%.0f', math.ceil(math.max(head, now)))) end

local function move_scores(set)
  local all = redis.call('ZRANGE', set, 0, -1, 'WITHSCORES')
  for i = 1, #all, 2 do redis.call('ZADD', set, string.format('%.17g', tonumber(all[i + 1]) - by), all[i]) end
end

move_scores(timeout)
move_scores(leases)
-- An expiry that pending.expire() has set.
for _, key in ipairs({timeout, ordered}) do
  local left = redis.call('PTTL', key)
  if left > 0 then redis.call('PEXPIRE', key, math.max(0, left - by)) end
end
return 1
