-- bury: turn messages into dead letters.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  dead           ZSET  names of dead letters, scored by when they died, microseconds
-- KEYS[18]  dead_messages  HASH  name to why, as JSON, newline, body: see include/letters.lua
-- ARGV[...]  id, token, priority, why  for each message; why is JSON on one line; where it ends in an
-- empty error, the last one that is known takes its place
--
-- Returns 1 or 0 for each: 0 when the lease is not ours any more, and nothing was changed.
-- include: clock
-- include: queue
-- include: letters

local now = now_us()
local reply = {}
for i = 1, #ARGV, 4 do
  local id, token, priority, why = unpack(ARGV, i, i + 3)
  local mine = holds(redis.call('HGET', KEYS[12], id), token)
  reply[#reply + 1] = mine and 1 or 0
  if mine then
    local body, last = redis.call('HGET', KEYS[11], id), redis.call('HGET', KEYS[15], id)
    if last and string.sub(why, -11) == '"error":""}' then why = string.sub(why, 1, -4) .. cjson.encode(last) .. '}' end
    -- First the write that frees memory: then a full server accepts the rest.
    remove(id, tonumber(priority))
    post(KEYS[17], KEYS[18], id, why, body or '', now)
  end
end
return reply
