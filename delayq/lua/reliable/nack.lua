-- nack: make messages that were not handled due again after a delay.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  wake  CHANNEL  where a new head is announced: its due time, microseconds
-- ARGV[...]  id, token, priority, delay_us, error  for each message; the error may be empty
--
-- Returns 1 or 0 for each: 0 when the lease is not ours any more, and nothing was changed.
-- include: clock
-- include: queue

local now = now_us()
local reply = {}
for i = 1, #ARGV, 5 do
  local id, token, priority, delay, error = unpack(ARGV, i, i + 4)
  local value = redis.call('HGET', KEYS[12], id)
  local mine = holds(value, token)
  reply[#reply + 1] = mine and 1 or 0
  if mine then
    local lease = lease_of(value) or {attempt = 1, forgiven = 0}
    redis.call('HDEL', KEYS[12], id)
    redis.call('HSET', KEYS[13], id, tries(lease.attempt, lease.forgiven))
    if error ~= '' then redis.call('HSET', KEYS[15], id, error) end
    place(id, tonumber(priority), now + tonumber(delay), KEYS[17])
  end
end
return reply
