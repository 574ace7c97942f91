-- cancel: remove pending records, as if they had never been offered.
--
-- Keys:
--   timeout  ZSET  records, scored by due time, ms
--   ordered  LIST  the same records in offer order
-- Arguments:
--   stale      0 or 1  whether to also remove records that are only in the ordered list
--   record...  bytes   each whole, as it was stored
-- Roles: producer, admin
-- Repeatable: no
--
-- Returns the number of records that were there.
-- include: clock
-- include: record
-- include: forget

-- A key of a foreign type must fail before anything is removed.
local length = redis.call('LLEN', ordered)
local now = now_us()
local cancelled, only_listed = {}, {}
for _, record in ipairs(records) do
  local group = redis.call('ZREM', timeout, record) == 1 and cancelled or only_listed
  group[#group + 1] = record
end
remove_from_list(cancelled, now)
if stale == '0' or #only_listed == 0 then return #cancelled end
length = redis.call('LLEN', ordered)
remove_from_list(only_listed, now)
return #cancelled + length - redis.call('LLEN', ordered)
