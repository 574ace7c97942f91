-- list: look at messages in one state. Those that wait come in the order in which they are handed
-- out, but all suspects first, and those of groups last; leased ones by the end of the lease.
--
-- Keys:
--   messages  see include/queue.lua
-- Arguments:
--   state   text  "delayed", "ready" or "leased"
--   offset  int   skip this many
--   limit   int   look at this many at most
-- Roles: admin, dashboard
-- Repeatable: yes
--
-- Returns {looked_at, id, {state, priority, moment, attempt, body, error}, ...}: fewer than were
-- looked at if some have expired. If fewer than `limit` were looked at, there are no more.
-- include: clock
-- include: leases
-- include: queue

local now = now_us()
offset, limit = tonumber(offset), tonumber(limit)
local reply = {0}
local from, to = '-inf', format_score(now)
if state ~= 'ready' then from, to = '(' .. to, '+inf' end

local function list_from(set)
  if limit == 0 then return end
  local ids = redis.call('ZRANGEBYSCORE', set, from, to, 'LIMIT', offset, limit)
  for _, id in ipairs(ids) do
    local found = describe(id, now)
    if found then reply[#reply + 1], reply[#reply + 2] = id, found end
  end
  offset = #ids > 0 and 0 or math.max(0, offset - redis.call('ZCOUNT', set, from, to))
  limit, reply[1] = limit - #ids, reply[1] + #ids
end

if state ~= 'delayed' then list_from(leased) end
if state ~= 'leased' then
  for _, where in ipairs(used_sets()) do list_from(waiting[where]) end
end
return reply
