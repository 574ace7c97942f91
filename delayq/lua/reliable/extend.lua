-- extend: make leases end later, or sooner.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  wake  CHANNEL  where a lease that ends sooner is announced: its end, microseconds
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
local moment = now + tonumber(ARGV[1])
local ends, sooner_than_known = number(moment), false
for i, id in ipairs(ids) do
  local held = holds(leases[i], ARGV[i * 3])
  reply[i + 1] = held and 1 or 0
  if held then
    mine[#mine + 1] = id
    local at = tonumber(ARGV[i * 3 + 1]) + 1
    local set = by_set[at] or {}
    set[#set + 1], set[#set + 2] = ends, id
    by_set[at] = set
    -- Leases are renewed many at a time, and end later. A lease that ends sooner comes alone.
    if #ids == 1 then sooner_than_known = moment < tonumber(redis.call('ZSCORE', KEYS[at], id) or 0) end
  end
end
-- There is nothing to delete. But a full server lets a script make a write that frees memory, and then accepts all the rest.
if #mine > 0 then redis.call('HDEL', KEYS[13], unpack(mine)) end
for at, set in pairs(by_set) do
  redis.call('ZADD', KEYS[at], 'XX', unpack(set))
  -- The others would wake too late otherwise.
  if sooner_than_known and head_of(KEYS[at]) == mine[1] then announce(moment, KEYS[17]) end
end
return reply
