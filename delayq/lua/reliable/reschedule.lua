-- reschedule: give a message that no worker has a new delay, counted from now.
--
-- Keys:
--   messages  see include/queue.lua
--   wake  CHANNEL  where a new head is announced: its due time, microseconds
-- Arguments:
--   id        text  of the message
--   delay_us  int   time from now, microseconds
-- Roles: producer, admin
-- Repeatable: yes
--
-- Returns 1, or 0 if there is none of that id, it has expired, or a worker has it.
-- include: clock
-- include: leases
-- include: queue

local now = now_us()
local found = find_message(id, now)
if not found or found.leased or found.expired then return 0 end
return_message(id, find_record(id, found), now + tonumber(delay_us), now)
return 1
