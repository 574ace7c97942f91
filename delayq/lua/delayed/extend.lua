-- extend: make leases end later, or sooner.
--
-- KEYS[1]  leases  ZSET  tokens of what is out, scored by the end of their lease, ms
-- ARGV[1]  lease_us  int   how long from now, microseconds
-- ARGV[...]  token  each names one payload that was handed out
--
-- Returns {ends_ms, held, held, ...}: the new end, and for each token 1, or 0 when nothing is out under it any more.
-- include: clock

local ends = due_ms(now_us(), tonumber(ARGV[1]))
local reply = {ends}
for i = 2, #ARGV do
  reply[i] = redis.call('ZSCORE', KEYS[1], ARGV[i]) and 1 or 0
  if reply[i] == 1 then redis.call('ZADD', KEYS[1], 'XX', string.format('%.0f', ends), ARGV[i]) end
end
return reply
