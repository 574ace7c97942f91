-- release: return messages that were handed out and not touched. They wait again as before, and no attempt is counted.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  wake  CHANNEL  where a new head is announced: its due time, microseconds
-- ARGV[...]  id, token, priority  for each message
--
-- Returns 1 or 0 for each: 0 when the lease is not ours any more, and nothing was changed.
-- include: clock
-- include: queue

local now = now_us()
local reply = {}
for i = 1, #ARGV, 3 do
  local id, token, priority = unpack(ARGV, i, i + 2)
  local value = redis.call('HGET', KEYS[12], id)
  local mine = holds(value, token)
  reply[#reply + 1] = mine and 1 or 0
  if mine then
    local lease = lease_of(value) or {attempt = 1, forgiven = 0, due = now}
    redis.call('HDEL', KEYS[12], id)
    if lease.mark == 's' then
      local was = {lease.attempt - 1, number(lease.due), 'l' .. lease.forgiven, ''}
      redis.call('HSET', KEYS[12], id, table.concat(was, ':'))
      place_suspect(id, tonumber(priority), lease.due, KEYS[17])
    else
      if lease.attempt > 1 then redis.call('HSET', KEYS[13], id, tries(lease.attempt - 1, lease.forgiven)) end
      place(id, tonumber(priority), lease.due, KEYS[17])
    end
  end
end
return reply
