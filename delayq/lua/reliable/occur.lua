-- occur: put the occurrences in place that follow these, which are about to be handed to workers.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  wake       CHANNEL  where a new head is announced: its due time, microseconds
-- KEYS[18]  schedules  HASH     name to what is known of it: see include/schedule.lua
-- ARGV[...]  id, token, priority  for each occurrence, under a lease
--
-- Returns {1 or 0, left, ...} for each: 0 when it is not to be handed out, because the one before it is still alive, and it is
-- dropped, or because the lease is not ours any more; and how many moments are known beyond the next one, -1 when that does not
-- matter, -2 when there is no such schedule.
-- include: clock
-- include: queue
-- include: schedule

local now = now_us()
local shift = shift_of(KEYS[18])
local reply = {}
for i = 1, #ARGV, 3 do
  local id, token, priority = unpack(ARGV, i, i + 2)
  local name, moment = string.match(id, '^(.*)@(%d+)$')
  local facts, content
  if name and name ~= '' then facts, content = load(KEYS[18], name) end
  local mine, left = holds(redis.call('HGET', KEYS[12], id), token), facts and -1 or -2
  if mine and facts and facts.next == moment then
    if occurrence(name, facts.last, now) then
      mine = false
      remove(id, tonumber(priority))
    else
      facts.last = moment
    end
    -- An occurrence that was brought forward must not come a second time.
    go_on(facts, math.max(now + shift, tonumber(moment)))
    put(name, facts, content, now, shift, KEYS[17])
    save(KEYS[18], name, facts, content)
    if tonumber(facts.every) == 0 then left = #facts.upcoming end
  end
  reply[#reply + 1] = mine and 1 or 0
  reply[#reply + 1] = left
end
return reply
