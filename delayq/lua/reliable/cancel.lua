-- cancel: delete messages that no worker has.
--
-- Keys:
--   messages  see include/queue.lua
-- Arguments:
--   id...  text  of each message
-- Roles: producer, admin
-- Repeatable: no
--
-- Returns for each message: 1, or 0 if there is none of that id, it has expired, or a worker has
-- it.
-- include: clock
-- include: leases
-- include: queue

local now = now_us()
local reply = {}
for i, id in ipairs(ids) do
  local found = find_message(id, now)
  local is_waiting = found and not found.leased and not found.expired
  reply[i] = is_waiting and 1 or 0
  if is_waiting then delete_message(id, found.priority) end
end
return reply
