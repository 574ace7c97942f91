-- advance_delayed: let time go by for a delayed queue: everything that it has stored moves back.
--
-- KEYS[1]  timeout  ZSET     records, scored by due time, ms
-- KEYS[2]  ordered  LIST     the same records in offer order
-- KEYS[3]  channel  CHANNEL  where a new head is announced: its due time, ms
-- KEYS[4]  leases   ZSET     tokens of what is out under a lease, scored by its end, ms
-- ARGV[1]  by_us  int  how far; in whole milliseconds, rounded up
--
-- Returns 1.

local by = math.ceil(tonumber(ARGV[1]) / 1000)
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local head
for _, key in ipairs({KEYS[1], KEYS[4]}) do
  local first = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
  if first and (not head or first - by < head) then head = first - by end
end
-- Before anything is written, so that a user who may not publish has changed nothing. Not a moment that has passed: a client that
-- has dealt with it takes it for a late message.
if head then redis.call('PUBLISH', KEYS[3], string.format('%.0f', math.ceil(math.max(head, now)))) end

local function move_scores(key)
  local all = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  for i = 1, #all, 2 do redis.call('ZADD', key, string.format('%.17g', tonumber(all[i + 1]) - by), all[i]) end
end

move_scores(KEYS[1])
move_scores(KEYS[4])
-- What pending.expire() has asked for.
for at = 1, 2 do
  local left = redis.call('PTTL', KEYS[at])
  if left > 0 then redis.call('PEXPIRE', KEYS[at], math.max(0, left - by)) end
end
return 1
