-- poll_last: move the newest pending message, undelayed, to the head of a ready list. Without an
-- ordered list, move the one that is due last. Records on the way that cannot be read go to
-- quarantine.
--
-- Keys:
--   timeout      ZSET  records, scored by due time, ms
--   ordered      LIST  the same records in offer order
--   quarantine   LIST  records that cannot be read
--   destination  LIST  the ready list that gets the payload
-- Arguments:
--   listed  0 or 1  whether the ordered list is kept
--   limit   int     look at this many records at most
-- Roles: admin
-- Repeatable: no
--
-- Returns {left, payload}. left: the number of records that left. payload: absent if all of them
-- could not be read, or none was pending.
-- include: clock
-- include: record
-- include: forget

redis.call('LLEN', quarantine)
redis.call('LLEN', destination)
redis.call('ZCARD', timeout)
redis.call('LLEN', ordered)
local is_listed, left = listed == '1', 0
while left < tonumber(limit) do
  local record
  if is_listed then record = redis.call('LINDEX', ordered, -1) else record = redis.call('ZRANGE', timeout, -1, -1)[1] end
  if not record then break end
  -- A full server accepts all writes after one that takes no memory. This also tells whether the last
  -- one is permitted: until then, the message is in the sorted set.
  redis.call('ZREM', timeout, '\255')
  if is_listed then redis.call('RPOP', ordered) else remove_from_list({record}, now_us()) end
  left = left + 1
  local payload = payload_of(record)
  if payload then redis.call('LPUSH', destination, payload) else redis.call('RPUSH', quarantine, record) end
  redis.call('ZREM', timeout, record)
  if payload then return {left, payload} end
end
return {left}
