-- recur: make sure that the next occurrence of each of these schedules is in place, whatever became of the last one.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  wake       CHANNEL  where a new head is announced: its due time, microseconds
-- KEYS[18]  schedules  HASH     name to what is known of it: see include/schedule.lua
-- ARGV[...]  name  of each schedule
--
-- Returns for each how many moments are known beyond the next one: -1 when that does not matter, -2 when there is no such
-- schedule any more.
-- include: clock
-- include: queue
-- include: schedule

local now = now_us()
local shift = shift_of(KEYS[18])
local reply = {}
for i, name in ipairs(ARGV) do
  local facts, content = load(KEYS[18], name)
  reply[i] = -2
  if facts then
    if not occurrence(name, facts.next, now) then
      -- Cancelled, purged, expired or dead: that occurrence is over.
      go_on(facts, math.max(now + shift, tonumber(facts.next) or 0))
      put(name, facts, content, now, shift, KEYS[17])
      save(KEYS[18], name, facts, content)
    end
    reply[i] = tonumber(facts.every) > 0 and -1 or #facts.upcoming
  elseif string.find(redis.call('HGET', KEYS[18], name) or '', '^{"ended":') and not last_of_ended(KEYS[18], name, now) then
    redis.call('HDEL', KEYS[18], name)
  end
end
return reply
