-- advance_reliable: let time go by for a reliable queue: everything that it has stored moves back.
--
-- Keys:
--   messages       see reliable/include/queue.lua
--   wake           CHANNEL  where a new head is announced: its due time, microseconds
--   remembered     ZSET     ids of messages that were handled lately, scored by the end of the time
--                           for which they are remembered, microseconds
--   dead           ZSET     names of dead letters, scored by their time of death, microseconds
--   dead_messages  HASH     name to the reason, as JSON, newline, body: see include/letters.lua
--   record_times   ZSET     ids with a record, scored by its last change, microseconds
--   records        HASH     these records: see reliable/include/records.lua
--   schedules      HASH     recurring messages; its empty field counts how far their time has moved
--   settings       HASH     see reliable/include/settings.lua: its field "ungrouped_turn"
--   kept_slots     ZSET     names of cancelled messages that keep their slots, scored by the end of
--                           their leases, microseconds
--   batches        HASH     see reliable/include/batches.lua
--   batch_members  ZSET     see reliable/include/batches.lua
-- Arguments:
--   by_us  int  how far, microseconds
-- Repeatable: no
--
-- Returns 1.
-- include: checkpoint

local shift_us = tonumber(by_us)
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local head

-- Not before the epoch. Suspects keep their scores, which are below 0.
local function back(moment)
  moment = tonumber(moment) or 0
  return string.format('%.2f', moment < 0 and moment or math.max(0, moment - shift_us))
end

local function move_scores(set)
  local all = redis.call('ZRANGE', set, 0, -1, 'WITHSCORES')
  for i = 1, #all, 2 do redis.call('ZADD', set, back(all[i + 1]), all[i]) end
  local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')[2]
  return first and tonumber(first)
end

local function move_values(hash, moved)
  local all = redis.call('HGETALL', hash)
  for i = 1, #all, 2 do redis.call('HSET', hash, all[i], moved(all[i + 1])) end
end

local function moved_body(body)
  local enqueued = tonumber(string.match(string.sub(body, 1, 16), '^%d+'))
  return enqueued and string.format('%016.0f', math.max(0, enqueued - shift_us)) .. string.sub(body, 17) or body
end

-- The ends of sleeps are in the first line, each behind "=" or ",".
local function moved_checkpoint(stored)
  local report, checkpoint = split_checkpoint(stored)
  local line, rest = string.match(checkpoint, '^([^\n]*)(.*)$')
  line = string.gsub(line, '([=,])(%d+)', function(mark, moment)
    return mark .. string.format('%016.0f', math.max(0, tonumber(moment) - shift_us))
  end)
  return with_progress(report, line .. rest)
end

-- The tokens that workers have stay good.
local ids_and_ends = redis.call('ZRANGE', leased, 0, -1, 'WITHSCORES')
for i = 1, #ids_and_ends, 2 do
  local id = ids_and_ends[i]
  if redis.call('HEXISTS', tokens, id) == 0 then redis.call('HSET', tokens, id, ids_and_ends[i + 1]) end
end
for _, set in ipairs({leased, kept_slots, group_waiting, group_turns, suspect_turns, unpack(waiting, 0)}) do
  local first = move_scores(set)
  if first and (not head or first < head) then head = first end
end
move_values(bodies, moved_body)
move_values(attempts, function(text)
  local used, due, mark = string.match(text, '^(%d+%-%d+:)([%d.]+)(.*)$')
  return used and used .. back(due) .. mark or text
end)
move_values(expiries, back)
move_values(checkpoints, moved_checkpoint)
move_scores(expiry_index)
-- A moment is written in 19 characters behind the group, a NUL, and the level where there is one.
local function moved_text(text, level)
  local nul = string.find(text, '\0', 1, true)
  if not nul or #text < nul + level + 19 then return text end
  local from = nul + level
  local moment = math.max(0, (tonumber(string.sub(text, from + 1, from + 19)) or 0) - shift_us)
  return string.sub(text, 1, from) .. string.format('%019.2f', moment) .. string.sub(text, from + 20)
end
local function move_members(set, level)
  for _, member in ipairs(redis.call('ZRANGE', set, 0, -1)) do
    local moved = moved_text(member, level)
    -- In this order, the set is never empty, so that it keeps its time to live.
    redis.call('ZADD', set, 0, moved)
    if moved ~= member then redis.call('ZREM', set, member) end
  end
end
move_values(positions, function(position) return moved_text(position, 1) end)
move_members(group_members, 1)
move_members(rate_log, 0)
local turn = redis.call('HGET', settings, 'ungrouped_turn')
if turn then redis.call('HSET', settings, 'ungrouped_turn', back(turn)) end
move_scores(remembered)
move_scores(dead)
move_values(dead_messages, function(letter)
  local why, body = string.match(letter, '^([^\n]*\n)(.*)$')
  if not why then return letter end
  why = string.gsub(why, '"due":"([%d.]+)"', function(due) return '"due":"' .. back(due) .. '"' end)
  local size = tonumber(string.match(why, ',"checkpoint":(%d+)}\n$')) or 0
  return why .. moved_checkpoint(string.sub(body, 1, size)) .. moved_body(string.sub(body, size + 1))
end)
move_scores(record_times)
move_values(records, function(record)
  local state, offered, rest = string.match(record, '^(%a+) (%d+)( .*)$')
  return state and state .. ' ' .. moved_body(offered) .. rest or record
end)
-- Moments that are 0, or later than all others, stand for "not yet".
local function moved_moment(moment)
  moment = tonumber(moment)
  return (moment == 0 or moment >= 9007199254740991) and moment or math.max(1, moment - shift_us)
end
local fields = redis.call('HGETALL', batches)
for i = 1, #fields, 2 do
  local batch = fields[i]
  local created, total, ended, forgotten = string.match(fields[i + 1], '^(%d+) (%S+) (%d+) (%d+)$')
  if created and not string.find(batch, '\0', 1, true) then
    local moved = string.format('\0%016.0f\0', moved_moment(forgotten)) .. batch
    redis.call('HSET', batches, batch, string.format('%.0f %s %.0f %.0f', moved_moment(created), total, moved_moment(ended), moved_moment(forgotten)))
    redis.call('ZADD', batch_members, 0, moved)
    local before = string.format('\0%016.0f\0', tonumber(forgotten)) .. batch
    if before ~= moved then redis.call('ZREM', batch_members, before) end
  end
end
for _, key in ipairs({remembered, record_times, records, rate_log, batches, batch_members}) do
  local left = redis.call('PTTL', key)
  if left > 0 then redis.call('PEXPIRE', key, math.max(0, math.ceil(left - shift_us / 1000))) end
end
redis.call('HINCRBY', schedules, '', string.format('%.0f', shift_us))
-- A hint. Never a moment that has passed: a client that has looked takes it for a late message.
if head then redis.pcall('PUBLISH', wake, string.format('%.0f', math.ceil(math.max(head, now)))) end
return 1
