-- purge: drop messages in one state, a bounded number at a time.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- ARGV[1]  state  text  "delayed", "ready" or "all"; with all, those that workers have go too
-- ARGV[2]  limit  int   drop so many at most
--
-- Returns how many were dropped; 0 when none are left.
-- include: clock
-- include: queue

-- A right that neither producers nor consumers have: they may remove single messages, and do not drop them all.
redis.call('ZCOUNT', KEYS[1], '-inf', '+inf')
local now = now_us()
local limit = tonumber(ARGV[2])
local from, to = '-inf', '+inf'
if ARGV[1] == 'ready' then to = number(now) end
if ARGV[1] == 'delayed' then from = '(' .. number(now) end
-- Leased ones stand among those that are delayed: look past them.
local look_at = limit
if ARGV[1] == 'delayed' then look_at = limit + redis.call('HLEN', KEYS[12]) end
local dropped = {}
for _, at in ipairs(live_sets()) do
  local here = {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[at], from, to, 'LIMIT', 0, look_at)) do
    if #dropped < limit and (ARGV[1] ~= 'delayed' or not is_leased(id, at - 1, now)) then
      here[#here + 1], dropped[#dropped + 1] = id, id
    end
  end
  if #here > 0 then redis.call('ZREM', KEYS[at], unpack(here)) end
end
forget(dropped)
return #dropped
