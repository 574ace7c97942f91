-- poll_last: move the newest pending message, undelayed, to the head of a ready list. Without an ordered list: the one that
-- is due last.
--
-- KEYS[1]  timeout      ZSET  records, scored by due time, ms
-- KEYS[2]  ordered      LIST  the same records in offer order
-- KEYS[3]  destination  LIST  the ready list that gets the payload
-- ARGV[1]  listed     0 or 1  whether the ordered list is kept
--
-- Returns the payload, or nil when nothing is pending. A record that nobody can read stays where it is: nil too.
-- include: clock
-- include: record
-- include: forget

redis.call('LLEN', KEYS[3])
local listed = ARGV[1] == '1'
local record
if listed then
  record = redis.call('LINDEX', KEYS[2], -1)
else
  redis.call('LLEN', KEYS[2])
  record = redis.call('ZRANGE', KEYS[1], -1, -1)[1]
end
local payload = record and payload_of(record)
if not payload then return false end
redis.call('ZREM', KEYS[1], record)
if listed then redis.call('RPOP', KEYS[2]) else forget_all(KEYS[2], {record}, now_us()) end
redis.call('LPUSH', KEYS[3], payload)
return payload
