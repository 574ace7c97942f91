-- extend: let a lease end later, or sooner.
--
-- KEYS[1]  leases  ZSET  tokens of what is out, scored by the end of their lease, ms
-- ARGV[1]  token     text  names the payload that was handed out
-- ARGV[2]  lease_us  int   how long from now, microseconds
--
-- Returns the new end in ms, or -1 when it is not out under that token any more.
-- include: clock

local ends = due_ms(now_us(), tonumber(ARGV[2]))
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return -1 end
redis.call('ZADD', KEYS[1], 'XX', string.format('%.0f', ends), ARGV[1])
return ends
