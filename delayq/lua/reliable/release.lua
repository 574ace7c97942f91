-- release: these messages were handed out and not touched: they wait again as before, and no attempt is counted.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  wake  CHANNEL  where a new head is announced: its due time, microseconds
-- ARGV[...]  id, token, priority  for each message
--
-- Returns 1 or 0 for each: 0 when the lease is not ours any more, and nothing was changed.
-- include: clock
-- include: queue

local reply = {}
for i = 1, #ARGV, 3 do
  local id, token, priority = unpack(ARGV, i, i + 2)
  local lease = redis.call('HGET', KEYS[12], id)
  local mine = holds(lease, token)
  reply[#reply + 1] = mine and 1 or 0
  if mine then
    local attempt, due = lease_of(lease)
    redis.call('HDEL', KEYS[12], id)
    if attempt > 1 then redis.call('HSET', KEYS[13], id, attempt - 1) end
    place(id, tonumber(priority), due, KEYS[17])
  end
end
return reply
