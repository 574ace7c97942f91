-- cancel: take out pending records, as if they had never been offered.
--
-- KEYS[1]  timeout  ZSET  records, scored by due time, ms
-- KEYS[2]  ordered  LIST  the same records in offer order
-- ARGV[1]  stale    0 or 1  whether to also take out records that are in the ordered list only
-- ARGV[...]  record  each whole, as it was stored
--
-- Returns how many were there.
-- include: clock
-- include: record
-- include: forget

local length = redis.call('LLEN', KEYS[2]) -- a key of a foreign type must fail before anything is removed
local now = now_us()
local cancelled, stale = {}, {}
for i = 2, #ARGV do
  local list = redis.call('ZREM', KEYS[1], ARGV[i]) == 1 and cancelled or stale
  list[#list + 1] = ARGV[i]
end
forget_all(KEYS[2], cancelled, now)
if ARGV[1] == '0' or #stale == 0 then return #cancelled end
length = redis.call('LLEN', KEYS[2])
forget_all(KEYS[2], stale, now)
return #cancelled + length - redis.call('LLEN', KEYS[2])
