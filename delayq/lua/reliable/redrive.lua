-- redrive: give dead letters another life, due now, with all their attempts.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  wake           CHANNEL  where a new head is announced: its due time, microseconds
-- KEYS[18]  dead           ZSET     ids of dead letters, scored by when they died, microseconds
-- KEYS[19]  dead_messages  HASH     id to why, as JSON, newline, body
-- ARGV[...]  id  of each dead letter
--
-- Returns for each: 1 it lives again, 0 there is none of that id, -1 a live message has the id.
-- include: clock
-- include: queue

-- A right that consumers do not have: they make dead letters, and do not clean up.
redis.call('ZCOUNT', KEYS[18], '-inf', '+inf')
local now = now_us()
local reply = {}
for i, id in ipairs(ARGV) do
  local letter = redis.call('HGET', KEYS[19], id)
  local taken = letter and redis.call('HEXISTS', KEYS[11], id) == 1
  reply[i] = taken and -1 or letter and 1 or 0
  if reply[i] == 1 then
    local why, body = string.match(letter, '^([^\n]*)\n(.*)$')
    local priority = cjson.decode(why).priority
    redis.call('ZREM', KEYS[18], id)
    redis.call('HDEL', KEYS[19], id)
    redis.call('HSET', KEYS[11], id, body)
    if priority > 0 then redis.call('HSET', KEYS[16], id, priority) end
    place(id, priority, now - (#ARGV - i) / 4, KEYS[17])
  end
end
return reply
