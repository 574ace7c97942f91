-- list: look at messages in one state. Those that wait come in the order in which they are handed
-- out, but all suspects first, and those of groups last; leased ones by the end of the lease.
--
-- Keys:
--   messages  see include/queue.lua
-- Arguments:
--   state   text  "delayed", "ready" or "leased"
--   brief   int   1: leave out attempt, body and error
--   offset  int   skip this many
--   limit   int   look at this many at most; 0: only count the messages in that state
-- Roles: admin, dashboard
-- Repeatable: yes
--
-- Returns {id, {state, priority, moment, attempt, body, error}, ...}, with nil for a message that has
-- expired: it counts towards the offset of the next page. If these are fewer than `limit`, there are
-- no more. With a limit of 0, returns {count, mortal}: count includes those that have expired; mortal:
-- how many messages of the queue have a time to live, and may be among them.
-- include: clock
-- include: leases
-- include: queue

local now = now_us()
offset, limit = tonumber(offset), tonumber(limit)
local counts, count = limit == 0, 0
local reply = {}
local from, to = '-inf', format_score(now)
if state ~= 'ready' then from, to = '(' .. to, '+inf' end

local function list_from(set)
  if counts then count = count + redis.call('ZCOUNT', set, from, to) end
  if limit == 0 then return end
  local ids = redis.call('ZRANGEBYSCORE', set, from, to, 'LIMIT', offset, limit)
  for _, id in ipairs(ids) do reply[#reply + 1], reply[#reply + 2] = id, describe(id, now, brief == '1') end
  offset = #ids > 0 and 0 or math.max(0, offset - redis.call('ZCOUNT', set, from, to))
  limit = limit - #ids
end

if state ~= 'delayed' then list_from(leased) end
if state ~= 'leased' then
  for _, where in ipairs(used_sets()) do list_from(waiting[where]) end
end
-- A message that a worker has does not expire.
local mortal = counts and state ~= 'leased' and redis.call('HLEN', expiries) or 0
return counts and {count, mortal} or reply
