-- release: return messages that were handed out and not touched. They wait again as before, and no
-- attempt is counted.
--
-- Keys:
--   messages  see include/queue.lua
--   wake      CHANNEL  where a new head is announced: its due time, microseconds
--   settings  HASH     see include/settings.lua
-- Arguments:
--   id...     text  of each message
--   token...  text  of its lease
-- Roles: consumer
-- Repeatable: no
--
-- Returns for each message: 1, or 0 if it is not leased under that token any more, and nothing was
-- changed.
-- include: clock
-- include: leases
-- include: groups
-- include: settle
-- include: queue

if COUNT > 1 then check_messages() end
local now = now_us()
local reply = {}
for at = FIRST, #ARGV, STRIDE do
  local id = ARGV[at + ID]
  local is_ours = lease_end(id, ARGV[at + TOKEN]) ~= nil
  reply[#reply + 1] = is_ours and 1 or 0
  if is_ours then give_back(id, now) end
end
return reply
