-- extend: let leases end later, or sooner.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- ARGV[1]  lease_us  int  how long from now, microseconds
-- ARGV[...]  id, token, priority  for each message
--
-- Returns {now_us, 1 or 0 for each}: 0 when the lease is not ours any more, and nothing was changed.
-- include: clock
-- include: queue

local now = now_us()
local ids, reply, mine, by_set = {}, {now}, {}, {}
for i = 2, #ARGV, 3 do ids[#ids + 1] = ARGV[i] end
local leases = redis.call('HMGET', KEYS[12], unpack(ids))
local ends = number(now + tonumber(ARGV[1]))
for i, id in ipairs(ids) do
  local held = holds(leases[i], ARGV[i * 3])
  reply[i + 1] = held and 1 or 0
  if held then
    mine[#mine + 1] = id
    local at = tonumber(ARGV[i * 3 + 1]) + 1
    local set = by_set[at] or {}
    set[#set + 1], set[#set + 2] = ends, id
    by_set[at] = set
  end
end
-- Nothing stands there. But a server that is full lets a script write what frees memory, and then all the rest.
if #mine > 0 then redis.call('HDEL', KEYS[13], unpack(mine)) end
for at, set in pairs(by_set) do redis.call('ZADD', KEYS[at], 'XX', unpack(set)) end
return reply
