-- unschedule: stop a message from recurring.
--
-- Keys:
--   messages  see include/queue.lua
--   wake       CHANNEL  where a new head is announced: its due time, microseconds
--   settings   HASH     see include/settings.lua
--   schedules  HASH  name to the facts about the schedule: see include/schedule.lua
-- Arguments:
--   name  text  of the schedule
-- Roles: consumer, admin
-- Repeatable: no
--
-- Returns 1, or 0 if there is none. The occurrence that waits is deleted; one that a worker has
-- stays.
-- include: clock
-- include: leases
-- include: groups
-- include: settle
-- include: queue
-- include: schedule

local now = now_us()
local facts = load_schedule(name)
if not facts then
  if last_of_ended(name, now) then return 0 end
  return redis.call('HDEL', schedules, name)
end
redis.call('HDEL', schedules, name)
local next_one, last = find_occurrence(name, facts.next, now), find_occurrence(name, facts.last, now)
if next_one and not next_one.leased then delete_message(name .. '@' .. facts.next, next_one.where) end
if next_one and next_one.leased then
  save_end(name, facts.next)
elseif last then
  save_end(name, facts.last)
end
return 1
