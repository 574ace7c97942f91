-- poll_last: move the newest pending message, undelayed, to the head of a ready list.
--
-- KEYS[1]  timeout      ZSET  records, scored by due time, ms
-- KEYS[2]  ordered      LIST  the same records in offer order
-- KEYS[3]  destination  LIST  the ready list that gets the payload
--
-- Returns the payload, or nil when nothing is pending. A record that nobody can read stays where it is: nil too.
-- include: record

redis.call('LLEN', KEYS[3])
local record = redis.call('LINDEX', KEYS[2], -1)
local payload = record and payload_of(record)
if not payload then return false end
redis.call('ZREM', KEYS[1], record)
redis.call('RPOP', KEYS[2])
redis.call('LPUSH', KEYS[3], payload)
return payload
