-- redrive: give dead letters another life, due now, with all their attempts.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  wake           CHANNEL  where a new head is announced: its due time, microseconds
-- KEYS[18]  dead           ZSET     names of dead letters, scored by when they died, microseconds
-- KEYS[19]  dead_messages  HASH     name to why, as JSON, newline, body: see include/letters.lua
-- ARGV[...]  name  of each dead letter
--
-- Returns for each: 1 it lives again, 0 there is none of that name, -1 a live message has the id, -2 it cannot be read, and it
-- stays, -3 it had no letter, and is gone.
-- include: clock
-- include: queue
-- include: letters

-- This needs a right that consumers do not have: they make dead letters, but do not clean up.
redis.call('ZCARD', KEYS[18])
local now = now_us()
local reply = {}
for i, name in ipairs(ARGV) do
  local letter = redis.call('HGET', KEYS[19], name)
  local why, body = string.match(letter or '', '^([^\n]*)\n(%d+ [^\n]*\n.*)$')
  local id = id_of(name)
  local found = body and find(id, now)
  if found and found.expired then
    set_aside(id, found, now)
    found = nil
  end
  reply[i] = not letter and 0 or not body and -2 or found and -1 or 1
  if reply[i] == 0 and redis.call('ZREM', KEYS[18], name) == 1 then reply[i] = -3 end
  if reply[i] == 1 then
    local readable, facts = pcall(cjson.decode, why)
    local priority = as_priority(readable and type(facts) == 'table' and facts.priority or nil)
    discard(KEYS[18], KEYS[19], {name})
    redis.call('HSET', KEYS[11], id, body)
    if priority > 0 then redis.call('HSET', KEYS[16], id, priority) end
    place(id, priority, now - (#ARGV - i) / 4, KEYS[17])
  end
end
return reply
