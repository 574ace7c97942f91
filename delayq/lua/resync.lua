-- resync: find out when a client must look at each of these queues. The safety net under lost notifications.
--
-- KEYS[...]  due  for each queue, as many as its kind has. Delayed: ZSET of records by due time, ms; ZSET of leases by their
--                 end, ms; LIST of payloads that are due. Reliable: its ten ZSETs of ids by moment, microseconds; HASH of its
--                 schedules.
-- ARGV[...]  kind  of each queue: "delayed" or "reliable"
--
-- Returns {now_us, wait_us, ready, wait_us, ready, ...}: the time until each queue's next message is due or lease ends (0
-- when it is so already, -1 when there is none), and how many are on its ready list, or how many schedules it has. A key of a
-- foreign type counts as empty here: it must not hide the other queues, and its own queue's next call tells of it.
-- include: clock

local now = now_us()
local at = 0
local function next_wait(unit)
  at = at + 1
  local known, wait = pcall(wait_us, KEYS[at], now, unit)
  return known and wait or -1
end
local reply = {now}
for _, kind in ipairs(ARGV) do
  local wait, ready = -1, 0
  if kind == 'delayed' then
    wait = sooner(next_wait(1000), next_wait(1000))
    at = at + 1
    ready = redis.pcall('LLEN', KEYS[at])
  else
    -- Most queues use only the first priority: one look tells.
    local others = redis.call('EXISTS', unpack(KEYS, at + 2, at + 10)) > 0
    wait = next_wait(1)
    for _ = 1, others and 9 or 0 do wait = sooner(wait, next_wait(1)) end
    at = at + (others and 1 or 10)
    ready = redis.pcall('HLEN', KEYS[at])
  end
  reply[#reply + 1] = wait
  reply[#reply + 1] = type(ready) == 'number' and ready or 0
end
return reply
