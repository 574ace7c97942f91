-- reschedule: give a message that no worker has a new delay, counted from now.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  wake  CHANNEL  where a new head is announced: its due time, microseconds
-- ARGV[1]  id        text  of the message
-- ARGV[2]  delay_us  int   how long from now, microseconds
--
-- Returns 1 or 0: 0 when there is none of that id, it has expired, or a worker has it.
-- include: clock
-- include: queue

local now = now_us()
local found = find(ARGV[1], now)
if not found or found.leased or found.expired then return 0 end
-- If its lease has ended, the attempt stays counted.
if found.lease then
  redis.call('HDEL', KEYS[12], ARGV[1])
  redis.call('HSET', KEYS[13], ARGV[1], tries(found.lease.attempt, forgiven_of(found.lease)))
end
place(ARGV[1], found.priority, now + tonumber(ARGV[2]), KEYS[17])
return 1
