-- list: look at waiting messages, in the order in which they are handed out.
--
-- Keys:
--   messages  see include/queue.lua
-- Arguments:
--   state   text  "delayed" or "ready"
--   offset  int   skip this many
--   limit   int   look at this many at most
-- Roles: admin, dashboard
-- Repeatable: yes
--
-- Returns {looked_at, id, {state, priority, moment, attempt, body, error}, ...}: fewer than were
-- looked at if leased ones are among the delayed, or some have expired. If fewer than `limit` were
-- looked at, there are no more.
-- include: clock
-- include: queue

local now = now_us()
offset, limit = tonumber(offset), tonumber(limit)
local reply = {0}

-- Return the ids of a set between two ranks. Suspects come first, the one with the lowest score
-- last.
local function ids_between(set, first, last)
  local suspects = redis.call('ZCOUNT', set, '-inf', '(0')
  if first >= suspects then return redis.call('ZRANGE', set, first, last) end
  local ids = {}
  local lowest_first = redis.call('ZRANGE', set, math.max(0, suspects - 1 - last), suspects - 1 - first)
  for i = #lowest_first, 1, -1 do ids[#ids + 1] = lowest_first[i] end
  for _, id in ipairs(last >= suspects and redis.call('ZRANGE', set, suspects, last) or {}) do ids[#ids + 1] = id end
  return ids
end
for _, priority in ipairs(used_priorities()) do
  local set = live[priority]
  local first, count = 0, redis.call('ZCOUNT', set, '-inf', format_score(now))
  if state == 'delayed' then first, count = count, redis.call('ZCARD', set) - count end
  if offset < count and limit > 0 then
    local ids = ids_between(set, first + offset, first + math.min(offset + limit, count) - 1)
    for _, id in ipairs(ids) do
      local found = describe(id, now)
      if found and found[1] == state then
        reply[#reply + 1] = id
        reply[#reply + 1] = found
      end
    end
    offset, limit, reply[1] = 0, limit - #ids, reply[1] + #ids
  else
    offset = math.max(0, offset - count)
  end
end
return reply
