-- schedule: make a message recur. Repeating a definition changes nothing.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  wake       CHANNEL  where a new head is announced: its due time, microseconds
-- KEYS[18]  schedules  HASH     name to what is known of it: see include/schedule.lua
-- ARGV[1]  name      text  of the schedule
-- ARGV[2]  timing    text  what says when, as the caller writes it: while that stays the same, so does the next moment
-- ARGV[3]  version   int   of the definition: a lower one than the stored one's changes nothing
-- ARGV[4]  every_us  int   the period; 0: the moments decide
-- ARGV[5]  priority  int   0 to 9
-- ARGV[6]  ttl_us    int   how long after its moment an occurrence lives; 0: no end
-- ARGV[7]  content   text  headers and payload
-- ARGV[...]  moment  for each of the next ones, in order, where there is no period
--
-- Returns {due_us, left}: when the next occurrence is due, -1 when that is unknown; and how many moments are known beyond it.
-- include: clock
-- include: queue
-- include: schedule

local now = now_us()
local shift = shift_of(KEYS[18])
local today = now + shift
local name, timing, version, priority, content = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[5]), ARGV[7]
local facts, stored = load(KEYS[18], name)
local function answer() return {facts.next == '' and -1 or tonumber(facts.next) - shift, #facts.upcoming} end
if facts and tonumber(version) < tonumber(facts.version) then return answer() end

local moments = {}
for i = 8, #ARGV do moments[#moments + 1] = ARGV[i] end
-- The moment that is over: its occurrence was cancelled, purged or the like, or is with a worker already.
local over
if not facts then
  facts = {next = '', last = last_of_ended(KEYS[18], name, now) or ''}
else
  local id = name .. '@' .. facts.next
  local changed = facts.timing ~= timing or stored ~= content or facts.priority ~= priority or facts.ttl ~= ARGV[6]
  local found = occurrence(name, facts.next, now)
  if not found then
    over = tonumber(facts.next) or 0
  elseif changed and found.leased then
    over, facts.last = tonumber(facts.next), facts.next
  elseif changed then
    remove(id, found.priority)
  end
end
local same = facts.timing == timing
facts.timing, facts.version, facts.priority, facts.ttl, facts.upcoming = timing, version, priority, ARGV[6], moments
if not same then
  facts.every, facts.first = ARGV[4], text(today + tonumber(ARGV[4]))
  go_on(facts, today)
elseif over then
  go_on(facts, math.max(today, over))
else
  while moments[1] and tonumber(moments[1]) <= tonumber(facts.next) do table.remove(moments, 1) end
end
put(name, facts, content, now, shift, KEYS[17])
save(KEYS[18], name, facts, content)
return answer()
