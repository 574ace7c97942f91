-- list: look at the messages in one state, in the order in which they come.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- ARGV[1]  state   text  "delayed", "ready" or "leased"
-- ARGV[2]  offset  int   pass over so many
-- ARGV[3]  limit   int   look at so many at most
--
-- Returns {id, {state, priority, moment, attempt, body, error}, ...}. Of delayed messages, a page may hold fewer: leased
-- ones stand among them, and are left out.
-- include: clock
-- include: queue

local now = number(now_us())
local state, offset, limit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local reply = {}
local function add(id)
  local found = describe(id, tonumber(now))
  if found and found[1] == state then
    reply[#reply + 1] = id
    reply[#reply + 1] = found
  end
end

if state == 'leased' then
  -- A look at each lease: no more of those than workers hold. A few commands for a thousand of them.
  local leased, ids = {}, redis.call('HKEYS', KEYS[12])
  for first = 1, #ids, 1000 do
    local last = math.min(first + 999, #ids)
    for _, at in ipairs(live_sets()) do
      for i, moment in ipairs(redis.call('ZMSCORE', KEYS[at], unpack(ids, first, last))) do
        if moment then leased[#leased + 1] = {tonumber(moment), ids[first + i - 1]} end
      end
    end
  end
  table.sort(leased, function(a, b) return a[1] < b[1] end)
  for i = offset + 1, math.min(#leased, offset + limit) do add(leased[i][2]) end
  return reply
end

local from, to = '-inf', now
if state == 'delayed' then from, to = '(' .. now, '+inf' end
for _, at in ipairs(live_sets()) do
  local count = redis.call('ZCOUNT', KEYS[at], from, to)
  if offset < count and limit > 0 then
    local ids = redis.call('ZRANGEBYSCORE', KEYS[at], from, to, 'LIMIT', offset, limit)
    for _, id in ipairs(ids) do add(id) end
    offset, limit = 0, limit - #ids
  else
    offset = math.max(0, offset - count)
  end
end
return reply
