-- resync: when must somebody look at each of these queues? The safety net under lost notifications.
--
-- KEYS[...]  timeout, leases, ready  for each queue: ZSET of records by due time in ms, ZSET of leases by their end in
--                                    ms, LIST of payloads that are due
--
-- Returns {now_us, wait_us, ready, wait_us, ready, ...}: the time until each queue's next message is due or lease ends (0
-- when it is so already, -1 when there is none), and how many are ready. A key of a foreign type counts as empty here: it
-- must not hide the other queues, and its own queue's next call tells of it.
-- include: clock

local now = now_us()
local function wait_of(key)
  local known, wait = pcall(wait_us, key, now)
  return known and wait or -1
end
local reply = {now}
for i = 1, #KEYS, 3 do
  reply[#reply + 1] = sooner(wait_of(KEYS[i]), wait_of(KEYS[i + 1]))
  local ready = redis.pcall('LLEN', KEYS[i + 2])
  reply[#reply + 1] = type(ready) == 'number' and ready or 0
end
return reply
