-- resume_schedule: let a message recur again.
--
-- Keys:
--   messages  see include/queue.lua
--   wake       CHANNEL  where a new head is announced: its due time, microseconds
--   schedules  HASH     name to the facts about the schedule: see include/schedule.lua
--   settings   HASH     see include/settings.lua
-- Arguments:
--   name  text  of the schedule
-- Roles: consumer, admin
-- Repeatable: yes
--
-- Returns 1, or 0 if there is no such schedule. Occurrences that were missed meanwhile are over.
-- include: clock
-- include: leases
-- include: queue
-- include: schedule
-- include: at_rest

check_messages()
local facts, content = load_schedule(name)
if not facts then return 0 end
if not facts.paused then return 1 end
facts.paused = nil
local now, shift = now_us(), clock_shift()
if not find_occurrence(name, facts.next, now) and (tonumber(facts.next) or 0) <= now + shift then
  skip_to_after(facts, now + shift)
end
enqueue_next(name, facts, content, now, shift)
save_schedule(name, facts, content)
return 1
