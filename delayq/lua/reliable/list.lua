-- list: look at waiting messages, in the order in which they come.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- ARGV[1]  state   text  "delayed" or "ready"
-- ARGV[2]  offset  int   skip this many
-- ARGV[3]  limit   int   look at this many at most
--
-- Returns {looked_at, id, {state, priority, moment, attempt, body, error}, ...}: fewer than were looked at, where leased ones
-- are among the delayed, or some have expired. If fewer than `limit` were looked at, there are no more.
-- include: clock
-- include: queue

local now = now_us()
local state, offset, limit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local reply = {0}

-- Return the ids of a set between two ranks. Suspects come first, the one with the lowest score last.
local function in_order(at, first, last)
  local suspects = redis.call('ZCOUNT', KEYS[at], '-inf', '(0')
  if first >= suspects then return redis.call('ZRANGE', KEYS[at], first, last) end
  local ids = {}
  local some = redis.call('ZRANGE', KEYS[at], math.max(0, suspects - 1 - last), suspects - 1 - first)
  for i = #some, 1, -1 do ids[#ids + 1] = some[i] end
  for _, id in ipairs(last >= suspects and redis.call('ZRANGE', KEYS[at], suspects, last) or {}) do ids[#ids + 1] = id end
  return ids
end
for _, at in ipairs(live_sets()) do
  local first, count = 0, redis.call('ZCOUNT', KEYS[at], '-inf', number(now))
  if state == 'delayed' then first, count = count, redis.call('ZCARD', KEYS[at]) - count end
  if offset < count and limit > 0 then
    local ids = in_order(at, first + offset, first + math.min(offset + limit, count) - 1)
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
