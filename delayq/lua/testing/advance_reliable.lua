-- advance_reliable: let time go by for a reliable queue: everything that it has stored moves back.
--
-- Keys:
--   messages  see reliable/include/queue.lua
--   wake           CHANNEL  where a new head is announced: its due time, microseconds
--   done           ZSET     ids of messages that were handled lately, scored by the end of the time
--                           for which they are remembered, microseconds
--   dead           ZSET     names of dead letters, scored by their time of death, microseconds
--   dead_messages  HASH     name to the reason, as JSON, newline, body: see include/letters.lua
--   schedules      HASH     recurring messages; its empty field counts how far their time has moved
-- Arguments:
--   by_us  int  how far, microseconds
-- Repeatable: no
--
-- Returns 1.

local by = tonumber(by_us)
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local head

-- Not before the epoch. A score below 0 is a suspect's: its due time with a minus.
local function back(moment)
  local whole = tonumber(moment) or 0
  if whole < 0 then return math.min(-1, math.max(-9007199254740992, whole) + by) end
  return math.max(0, whole - by)
end

local function move_scores(set)
  local all = redis.call('ZRANGE', set, 0, -1, 'WITHSCORES')
  for i = 1, #all, 2 do redis.call('ZADD', set, string.format('%.2f', back(all[i + 1])), all[i]) end
end

local function move_values(hash, moved)
  local all = redis.call('HGETALL', hash)
  for i = 1, #all, 2 do redis.call('HSET', hash, all[i], moved(all[i + 1])) end
end

local function moved_body(body)
  local enqueued, rest = string.match(body, '^(%d+)(.*)$')
  return enqueued and string.format('%.0f', back(enqueued)) .. rest or body
end

for priority = 0, 9 do
  local set = live[priority]
  move_scores(set)
  local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')[2]
  if first and (not head or tonumber(first) < head) then head = tonumber(first) end
end
move_values(bodies, moved_body)
move_values(leases, function(lease)
  local attempt, due, token = string.match(lease, '^(%d+):([%d.]+):(.*)$')
  return not attempt and lease or attempt .. ':' .. string.format('%.2f', back(due)) .. ':' .. token
end)
move_values(expiries, function(expiry) return string.format('%.2f', back(expiry)) end)
move_scores(done)
move_scores(dead)
move_values(dead_messages, function(letter)
  local why, body = string.match(letter, '^([^\n]*\n)(.*)$')
  return why and why .. moved_body(body) or letter
end)
local left = redis.call('PTTL', done)
if left > 0 then redis.call('PEXPIRE', done, math.max(0, math.ceil(left - by / 1000))) end
redis.call('HINCRBY', schedules, '', by_us)
-- A hint. Never a moment that has passed: a client that has looked takes it for a late message.
if head then redis.pcall('PUBLISH', wake, string.format('%.0f', math.ceil(math.max(head, now)))) end
return 1
