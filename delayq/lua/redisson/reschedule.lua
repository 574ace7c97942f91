-- reschedule: give a pending record a new delay, counted from now, or a new moment. It keeps its
-- place in the ordered list.
--
-- Keys:
--   timeout  ZSET     records, scored by due time, ms
--   channel  CHANNEL  where a new head is announced: its due time, ms
-- Arguments:
--   record  bytes  whole, as it was stored
--   when    text   microseconds from now; or "@" and the moment, microseconds
-- Roles: producer, admin
-- Repeatable: no
--
-- Returns the new due time in ms, or -1 if the record is no longer pending.
-- include: clock

local due = due_ms(now_us(), when)
if not due or due > 9007199254740992 then return redis.error_reply('DELAYQ_DELAY delay out of range') end
if not redis.call('ZSCORE', timeout, record) then return -1 end
-- Before any write: a user who may not publish is refused, as Redisson's clients need to hear.
local first_two = redis.call('ZRANGE', timeout, 0, 1, 'WITHSCORES')
local head_due = tonumber(first_two[first_two[1] == record and 4 or 2])
if not head_due or due < head_due then redis.call('PUBLISH', channel, string.format('%.0f', due)) end
redis.call('ZADD', timeout, 'XX', string.format('%.0f', due), record)
return due
