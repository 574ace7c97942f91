-- poll_last: move the newest pending message, undelayed, to the head of a ready list. Without an ordered list, move the one that
-- is due last. Records on the way that cannot be read go to quarantine.
--
-- KEYS[1]  timeout      ZSET  records, scored by due time, ms
-- KEYS[2]  ordered      LIST  the same records in offer order
-- KEYS[3]  quarantine   LIST  records that cannot be read
-- KEYS[4]  destination  LIST  the ready list that gets the payload
-- ARGV[1]  listed     0 or 1  whether the ordered list is kept
-- ARGV[2]  limit      int     look at no more records than this
--
-- Returns {left, payload}. left: how many records left. payload: absent where all of them could not be read, or none was pending.
-- include: clock
-- include: record
-- include: forget

redis.call('LLEN', KEYS[3])
redis.call('LLEN', KEYS[4])
redis.call('ZCARD', KEYS[1])
redis.call('LLEN', KEYS[2])
local listed, left = ARGV[1] == '1', 0
while left < tonumber(ARGV[2]) do
  local record
  if listed then record = redis.call('LINDEX', KEYS[2], -1) else record = redis.call('ZRANGE', KEYS[1], -1, -1)[1] end
  if not record then break end
  redis.call('ZREM', KEYS[1], record)
  if listed then redis.call('RPOP', KEYS[2]) else forget_all(KEYS[2], {record}, now_us()) end
  left = left + 1
  local payload = payload_of(record)
  if payload then
    redis.call('LPUSH', KEYS[4], payload)
    return {left, payload}
  end
  redis.call('RPUSH', KEYS[3], record)
end
return {left}
