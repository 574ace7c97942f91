-- recur: make sure that the next occurrence of each of these schedules waits, whatever became of
-- the last one.
--
-- Keys:
--   messages   see include/queue.lua
--   wake       CHANNEL  where a new head is announced: its due time, microseconds
--   schedules  HASH     name to the facts about the schedule: see include/schedule.lua
-- Arguments:
--   name...  text  of each schedule
-- Roles: consumer
-- Repeatable: yes
--
-- Returns {missing, left...}. missing: the number of occurrences that were not in place. left: for
-- each schedule the number of moments known beyond the next one: -1 if that does not matter, as while
-- it is paused, or has ended and its last occurrence is alive; -2 if there is no such schedule any
-- more.
-- include: clock
-- include: leases
-- include: queue
-- include: schedule

check_messages()
local now = now_us()
local shift = clock_shift()
local reply = {0}
for i, name in ipairs(names) do
  local facts, content = load_schedule(name)
  i = i + 1
  reply[i] = -2
  if facts and facts.paused then
    reply[i] = -1
  elseif facts then
    if not find_occurrence(name, facts.next, now) then
      -- Cancelled, purged, expired or dead: that occurrence is over.
      skip_to_after(facts, math.max(now + shift, tonumber(facts.next) or 0))
      if facts.next ~= '' then reply[1] = reply[1] + 1 end
      enqueue_next(name, facts, content, now, shift)
      save_schedule(name, facts, content)
    end
    reply[i] = tonumber(facts.every) > 0 and -1 or #facts.upcoming
  elseif last_of_ended(name, now) then
    -- Then the caller asks again, until that occurrence is over.
    reply[i] = -1
  elseif string.find(redis.call('HGET', schedules, name) or '', '^{"ended":') then
    redis.call('HDEL', schedules, name)
  end
end
return reply
