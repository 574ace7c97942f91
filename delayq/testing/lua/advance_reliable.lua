-- advance_reliable: let time go by for a reliable queue: everything that it has stored moves back.
--
-- KEYS[1-16]  messages  see ../../lua/reliable/include/queue.lua
-- KEYS[17]  wake           CHANNEL  where a new head is announced: its due time, microseconds
-- KEYS[18]  done           ZSET     ids of messages that were handled lately, scored by how long they are remembered
-- KEYS[19]  dead           ZSET     ids of dead letters, scored by when they died
-- KEYS[20]  dead_messages  HASH     id to why, newline, body
-- KEYS[21]  schedules      HASH     recurring messages; its empty field counts how far their time has moved
-- ARGV[1]  by_us  int  how far
--
-- Returns 1.

local by = tonumber(ARGV[1])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local head

-- Not before the epoch. A score below 0 is a suspect's: its due time with a minus.
local function back(moment)
  local whole = tonumber(moment) or 0
  if whole < 0 then return math.min(-1, math.max(-9007199254740992, whole) + by) end
  return math.max(0, whole - by)
end

local function move_scores(key)
  local all = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  for i = 1, #all, 2 do redis.call('ZADD', key, string.format('%.2f', back(all[i + 1])), all[i]) end
end

local function move_values(key, moved)
  local all = redis.call('HGETALL', key)
  for i = 1, #all, 2 do redis.call('HSET', key, all[i], moved(all[i + 1])) end
end

local function moved_body(body)
  local enqueued, rest = string.match(body, '^(%d+)(.*)$')
  return enqueued and string.format('%.0f', back(enqueued)) .. rest or body
end

for at = 1, 10 do
  move_scores(KEYS[at])
  local first = redis.call('ZRANGE', KEYS[at], 0, 0, 'WITHSCORES')[2]
  if first and (not head or tonumber(first) < head) then head = tonumber(first) end
end
move_values(KEYS[11], moved_body)
move_values(KEYS[12], function(lease)
  local attempt, due, token = string.match(lease, '^(%d+):([%d.]+):(.*)$')
  return not attempt and lease or attempt .. ':' .. string.format('%.2f', back(due)) .. ':' .. token
end)
move_values(KEYS[14], function(expiry) return string.format('%.2f', back(expiry)) end)
move_scores(KEYS[18])
move_scores(KEYS[19])
move_values(KEYS[20], function(letter)
  local why, body = string.match(letter, '^([^\n]*\n)(.*)$')
  return why and why .. moved_body(body) or letter
end)
local left = redis.call('PTTL', KEYS[18])
if left > 0 then redis.call('PEXPIRE', KEYS[18], math.max(0, math.ceil(left - by / 1000))) end
redis.call('HINCRBY', KEYS[21], '', ARGV[1])
-- A hint. Not a moment that has passed: who hears of one that he has dealt with takes it for a late message.
if head then redis.pcall('PUBLISH', KEYS[17], string.format('%.0f', math.ceil(math.max(head, now)))) end
return 1
