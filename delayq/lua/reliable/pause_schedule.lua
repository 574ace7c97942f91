-- pause_schedule: keep a message from recurring until its schedule is resumed.
--
-- Keys:
--   messages   see include/queue.lua
--   wake       CHANNEL  where a new head is announced: its due time, microseconds
--   settings   HASH     see include/settings.lua
--   schedules  HASH     name to the facts about the schedule: see include/schedule.lua
-- Arguments:
--   name  text  of the schedule
-- Roles: consumer, admin
-- Repeatable: yes
--
-- Returns 1, or 0 if there is no such schedule. The occurrence that waits is deleted; one that a
-- worker has stays.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue
-- include: schedule
-- include: at_rest

local facts, content = load_schedule(name)
if not facts then return 0 end
if facts.paused then return 1 end
check_messages()
local now = now_us()
local occurrence = find_occurrence(name, facts.next, now)
if not occurrence then
  -- Cancelled, purged, expired or dead: that occurrence is over.
  skip_to_after(facts, math.max(now + clock_shift(), tonumber(facts.next) or 0))
elseif not occurrence.leased then
  demand_storing(name)
  delete_message(name .. '@' .. facts.next, occurrence.where)
end
facts.paused = true
save_schedule(name, facts, content)
return 1
