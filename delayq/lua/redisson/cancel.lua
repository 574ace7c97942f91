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
local cancelled, only_listed, seen = {}, {}, {}
for i, score in ipairs(redis.call('ZMSCORE', timeout, unpack(records))) do
  local record = records[i]
  local group = score and not seen[record] and cancelled or only_listed
  group[#group + 1], seen[record] = record, true
end
if #cancelled > 0 then
  -- This tells whether the last write is permitted: until then, each message is in the sorted set.
  redis.call('ZREM', timeout, '\255')
  remove_from_list(cancelled, now)
  redis.call('ZREM', timeout, unpack(cancelled))
end
if stale == '0' or #only_listed == 0 then return #cancelled end
length = redis.call('LLEN', ordered)
remove_from_list(only_listed, now)
return #cancelled + length - redis.call('LLEN', ordered)
