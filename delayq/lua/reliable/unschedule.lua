-- unschedule: stop a message from recurring.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  schedules  HASH  name to what is known of it: see include/schedule.lua
-- ARGV[1]  name  text  of the schedule
--
-- Returns 1, or 0 when there is none. The occurrence that waits is dropped; one that a worker has stays.
-- include: clock
-- include: queue
-- include: schedule

local now, name = now_us(), ARGV[1]
local facts = load(KEYS[17], name)
if not facts then
  if last_of_ended(KEYS[17], name, now) then return 0 end
  return redis.call('HDEL', KEYS[17], name)
end
redis.call('HDEL', KEYS[17], name)
local waiting, last = occurrence(name, facts.next, now), occurrence(name, facts.last, now)
if waiting and not waiting.leased then remove(name .. '@' .. facts.next, waiting.priority) end
if waiting and waiting.leased then
  save_end(KEYS[17], name, facts.next)
elseif last then
  save_end(KEYS[17], name, facts.last)
end
return 1
