-- unschedule: stop a message from recurring.
--
-- Keys:
--   messages   see include/queue.lua
--   wake       CHANNEL  where a new head is announced: its due time, microseconds
--   settings   HASH     see include/settings.lua
--   schedules  HASH     name to the facts about the schedule: see include/schedule.lua
-- Arguments:
--   name  text  of the schedule
-- Roles: consumer, admin
-- Repeatable: no
--
-- Returns 1, or 0 if there is none. The occurrences that wait are deleted, also one that waits for a
-- retry; one that a worker has stays.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue
-- include: schedule
-- include: at_rest

-- A key of a foreign type must fail before the first write.
check_messages()
local now = now_us()
local facts, running = load_schedule(name), nil
if not facts then
  if last_of_ended(name, now) then return 0 end
  -- One that had ended was there no more.
  local had_ended = string.find(redis.call('HGET', schedules, name) or '', '^{"ended":')
  local deleted = redis.call('HDEL', schedules, name)
  return had_ended and 0 or deleted
end
demand_storing(name)
redis.call('HDEL', schedules, name)
for _, moment in ipairs({facts.last, facts.next}) do
  local occurrence = find_occurrence(name, moment, now)
  if occurrence and occurrence.leased then running = moment end
  if occurrence and not occurrence.leased then delete_message(name .. '@' .. moment, occurrence.where) end
end
if running then save_end(name, running) end
return 1
