-- resync: when must somebody look at each of these queues? The safety net under lost notifications.
--
-- KEYS[...]  timeout, ready  for each queue: ZSET of records by due time in ms, LIST of payloads that are due
--
-- Returns {now_us, wait_us, ready, wait_us, ready, ...}: the time until each queue's next message is due (0 when it is
-- already, -1 when there is none), and how many are ready. A key of a foreign type counts as empty here: it must not
-- hide the other queues, and its own queue's next call tells of it.
-- include: clock

local now = now_us()
local reply = {now}
for i = 1, #KEYS, 2 do
  local known, wait = pcall(wait_us, KEYS[i], now)
  reply[#reply + 1] = known and wait or -1
  local ready = redis.pcall('LLEN', KEYS[i + 1])
  reply[#reply + 1] = type(ready) == 'number' and ready or 0
end
return reply
