-- reschedule: give a pending record a new delay, counted from now. It keeps its place in the ordered list.
--
-- KEYS[1]  timeout   ZSET     records, scored by due time, ms
-- KEYS[2]  channel   CHANNEL  where a new head is announced: its due time, ms
-- ARGV[1]  record    bytes    whole, as it was stored
-- ARGV[2]  delay_us  int      how long from now, microseconds
--
-- Returns the new due time in ms, or -1 when the record is no longer pending.
-- include: clock

local delay = tonumber(ARGV[2])
local due = delay and delay >= 0 and due_ms(now_us(), delay)
if not due or due > 9007199254740992 then return redis.error_reply('DELAYQ_DELAY delay out of range') end
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return -1 end
-- Before anything is written: a user who may not publish is refused, because Redisson's clients have no other way to learn of it.
local first = redis.call('ZRANGE', KEYS[1], 0, 1, 'WITHSCORES')
local others = tonumber(first[first[1] == ARGV[1] and 4 or 2])
if not others or due < others then redis.call('PUBLISH', KEYS[2], string.format('%.0f', due)) end
redis.call('ZADD', KEYS[1], 'XX', string.format('%.0f', due), ARGV[1])
return due
