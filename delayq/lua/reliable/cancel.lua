-- cancel: take messages out that no worker has.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- ARGV[...]  id  of each message
--
-- Returns 1 or 0 for each: 0 when there is none of that id, or a worker has it.
-- include: clock
-- include: queue

local now = now_us()
local reply = {}
for _, id in ipairs(ARGV) do
  local mine = redis.call('HEXISTS', KEYS[11], id) == 1 and not is_leased(id, priority_of(id), now)
  reply[#reply + 1] = mine and 1 or 0
  if mine then remove({id}) end
end
return reply
