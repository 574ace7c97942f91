-- unschedule: let a message recur no more.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  schedules  HASH  name to what is known of it: see include/schedule.lua
-- ARGV[1]  name  text  of the schedule
--
-- Returns 1, or 0 when there is none. The occurrence that waits is dropped; one that a worker has stays.
-- include: clock
-- include: queue
-- include: schedule

local facts = load(KEYS[17], ARGV[1])
if not facts then return redis.call('HDEL', KEYS[17], ARGV[1]) end
local id = ARGV[1] .. '@' .. facts.next
redis.call('HDEL', KEYS[17], ARGV[1])
if lives(ARGV[1], facts.next) and not is_leased(id, facts.priority, now_us()) then remove({id}) end
return 1
