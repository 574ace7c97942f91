-- schedule: make a message recur. Repeating a definition changes nothing.
--
-- Keys:
--   messages   see include/queue.lua
--   wake       CHANNEL  where a new head is announced: its due time, microseconds
--   schedules  HASH     name to the facts about the schedule: see include/schedule.lua
--   settings   HASH     see include/settings.lua
-- Arguments:
--   partitions  int   the number of partitions by which the caller has found this one
--   name        text  of the schedule
--   timing      text  its times, as the caller writes them: while this stays the same, so does the
--                     next moment
--   version     int   of the definition: one lower than the stored one's changes nothing
--   every_us    int   the period, microseconds; 0: the moments decide
--   priority    int   0 to 9
--   ttl_us      int   how long after its moment an occurrence lives, microseconds; 0: no end
--   content     text  a space and headers, or nothing; newline, payload
--   moment...   int   each of the next ones, in order, microseconds, if there is no period
-- Roles: consumer
-- Repeatable: yes
-- Stores: yes
--
-- Returns {due_us, left}. due_us: the due time of the next occurrence, -1 if that is unknown. left:
-- the number of moments known beyond it. A paused schedule stays paused. An error, DELAYQ_SETTINGS,
-- if the queue has another number of partitions.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue
-- include: schedule
-- include: settings

if not agrees_on(partitions, unpack(redis.call('HMGET', settings, 'layout', 'partitions'))) then
  return settings_changed()
end
check_messages()
local now = now_us()
local shift = clock_shift()
local shifted_now = now + shift
priority = tonumber(priority)
local facts, stored_content = load_schedule(name)
local function reply() return {facts.next == '' and -1 or tonumber(facts.next) - shift, #facts.upcoming} end
if facts and tonumber(version) < tonumber(facts.version) then return reply() end

-- The moment that has passed: its occurrence was cancelled, purged or the like, or is with a worker
-- already.
local passed_moment
if not facts then
  facts = {next = '', last = last_of_ended(name, now) or ''}
else
  local has_changed = facts.timing ~= timing or stored_content ~= content or facts.priority ~= priority or facts.ttl ~= ttl_us
  local occurrence = find_occurrence(name, facts.next, now)
  if not occurrence and not facts.paused then
    passed_moment = tonumber(facts.next) or 0
  elseif occurrence and has_changed and occurrence.leased then
    passed_moment, facts.last = tonumber(facts.next), facts.next
  elseif occurrence and has_changed then
    demand_storing(name)
    delete_message(name .. '@' .. facts.next, occurrence.where)
  end
end
local has_same_timing = facts.timing == timing
facts.timing, facts.version, facts.priority, facts.ttl, facts.upcoming = timing, version, priority, ttl_us, moments
if not has_same_timing then
  facts.every, facts.first = every_us, format_moment(shifted_now + tonumber(every_us))
  skip_to_after(facts, shifted_now)
elseif passed_moment or facts.next == '' then
  skip_to_after(facts, math.max(shifted_now, passed_moment or 0))
else
  while moments[1] and tonumber(moments[1]) <= tonumber(facts.next) do table.remove(moments, 1) end
end
enqueue_next(name, facts, content, now, shift)
save_schedule(name, facts, content)
return reply()
