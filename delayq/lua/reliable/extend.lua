-- extend: let leases end later, or sooner.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- ARGV[1]  lease_us  int  how long from now, microseconds
-- ARGV[...]  id, token, priority  for each message
--
-- Returns {now_us, 1 or 0 for each}: 0 when the lease is not ours any more, and nothing was changed.
-- include: clock
-- include: queue

local now = now_us()
local reply = {now}
for i = 2, #ARGV, 3 do
  local id, token, priority = unpack(ARGV, i, i + 2)
  local mine = holds(redis.call('HGET', KEYS[12], id), token)
  reply[#reply + 1] = mine and 1 or 0
  if mine then
    -- Nothing stands there. But a server that is full lets a script write what frees memory, and then all the rest.
    redis.call('HDEL', KEYS[13], id)
    redis.call('ZADD', KEYS[priority + 1], 'XX', number(now + tonumber(ARGV[1])), id)
  end
end
return reply
