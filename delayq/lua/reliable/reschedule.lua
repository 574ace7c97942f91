-- reschedule: give a message that no worker has a new delay, counted from now.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  wake  CHANNEL  where a new head is announced: its due time, microseconds
-- ARGV[1]  id        text  of the message
-- ARGV[2]  delay_us  int   how long from now, microseconds
--
-- Returns 1 or 0: 0 when there is none of that id, or a worker has it.
-- include: clock
-- include: queue

local now = now_us()
local priority = priority_of(ARGV[1])
if redis.call('HEXISTS', KEYS[11], ARGV[1]) == 0 or is_leased(ARGV[1], priority, now) then return 0 end
-- Of a lease that has ended, the attempt stays counted.
local lease = redis.call('HGET', KEYS[12], ARGV[1])
if lease then
  redis.call('HSET', KEYS[13], ARGV[1], (lease_of(lease)))
  redis.call('HDEL', KEYS[12], ARGV[1])
end
place(ARGV[1], priority, now + tonumber(ARGV[2]), KEYS[17])
return 1
