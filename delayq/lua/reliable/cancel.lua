-- cancel: take out messages that no worker has.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- ARGV[...]  id  of each message
--
-- Returns 1 or 0 for each: 0 when there is none of that id, it has expired, or a worker has it.
-- include: clock
-- include: queue

local now = now_us()
local reply = {}
for i, id in ipairs(ARGV) do
  local found = find(id, now)
  local mine = found and not found.leased and not found.expired
  reply[i] = mine and 1 or 0
  if mine then remove(id, found.priority) end
end
return reply
