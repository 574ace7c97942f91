-- refill: store the next moments of a schedule.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  wake       CHANNEL  where a new head is announced: its due time, microseconds
-- KEYS[18]  schedules  HASH     name to what is known of it: see include/schedule.lua
-- ARGV[1]  name    text  of the schedule
-- ARGV[2]  timing  text  from which the moments were computed
-- ARGV[...]  moment  for each of them, in order
--
-- Returns 1, or 0 when the schedule has gone or has another timing by now.
-- include: clock
-- include: queue
-- include: schedule

local facts, content = load(KEYS[18], ARGV[1])
if not facts or facts.timing ~= ARGV[2] then return 0 end
local now = now_us()
local shift = shift_of(KEYS[18])
facts.upcoming = {}
for i = 3, #ARGV do
  if tonumber(ARGV[i]) > (tonumber(facts.next) or 0) then table.insert(facts.upcoming, ARGV[i]) end
end
if facts.next == '' then
  go_on(facts, now + shift)
  put(ARGV[1], facts, content, now, shift, KEYS[17])
end
save(KEYS[18], ARGV[1], facts, content)
return 1
