-- reschedule: give messages that no worker has a new delay, counted from now, or a new moment.
--
-- Keys:
--   messages  see include/queue.lua
--   wake      CHANNEL  where a new head is announced: its due time, microseconds
--   settings  HASH     see include/settings.lua
-- Arguments:
--   when   text  microseconds from now; or "@" and the moment, microseconds
--   id...  text  of each message
-- Roles: producer, admin
-- Repeatable: yes
--
-- Returns for each message: 1, or 0 if there is none of that id, it has expired, or a worker has
-- it.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue
-- include: at_rest

if #ids > 1 then check_messages() end
local now = now_us()
local due = math.max(now, moment_in(when) or now + tonumber(when))
local reply = {}
for i, id in ipairs(ids) do
  local message = find_message(id, now)
  local is_waiting = message and not message.leased and not message.expired
  reply[i] = is_waiting and 1 or 0
  if is_waiting then return_message(id, find_attempts(id, message), due, now) end
end
return reply
