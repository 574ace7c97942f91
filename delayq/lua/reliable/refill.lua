-- refill: store the next moments of a schedule.
--
-- Keys:
--   messages  see include/queue.lua
--   wake       CHANNEL  where a new head is announced: its due time, microseconds
--   schedules  HASH     name to the facts about the schedule: see include/schedule.lua
-- Arguments:
--   name       text  of the schedule
--   timing     text  from which the moments were computed
--   moment...  int   each of them, in order, microseconds
-- Roles: consumer
-- Repeatable: yes
--
-- Returns 1, or 0 if the schedule has gone or has another timing by now.
-- include: clock
-- include: leases
-- include: queue
-- include: schedule

check_messages()
local facts, content = load_schedule(name)
if not facts or facts.timing ~= timing then return 0 end
local now = now_us()
local shift = clock_shift()
facts.upcoming = {}
for _, moment in ipairs(moments) do
  if tonumber(moment) > (tonumber(facts.next) or 0) then table.insert(facts.upcoming, moment) end
end
if facts.next == '' then
  skip_to_after(facts, now + shift)
  enqueue_next(name, facts, content, now, shift)
end
save_schedule(name, facts, content)
return 1
