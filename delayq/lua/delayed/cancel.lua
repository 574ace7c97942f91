-- cancel: take pending records out, as if they had never been offered.
--
-- KEYS[1]  timeout  ZSET  records, scored by due time, ms
-- KEYS[2]  ordered  LIST  the same records in offer order
-- ARGV[...]  record  each whole, as it was stored
--
-- Returns how many were still pending.
-- include: clock
-- include: record
-- include: forget

redis.call('LLEN', KEYS[2]) -- a key of a foreign type must fail before anything is removed
local cancelled = {}
for _, record in ipairs(ARGV) do
  if redis.call('ZREM', KEYS[1], record) == 1 then cancelled[#cancelled + 1] = record end
end
forget_all(KEYS[2], cancelled, now_us())
return #cancelled
