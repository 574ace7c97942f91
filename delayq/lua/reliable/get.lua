-- get: look at messages.
--
-- Keys:
--   messages  see include/queue.lua
--   settings  HASH  see include/settings.lua
-- Arguments:
--   brief  int   1: leave out payloads
--   id...  text  of each message
-- Roles: admin, dashboard
-- Repeatable: yes
--
-- Returns for each message {state, priority, moment, attempt, body, error}, or nil if there is
-- none. moment: the due time, or the end of the lease, microseconds.
-- include: clock
-- include: leases
-- include: queue
-- include: at_rest

local now = now_us()
local reply = {}
for i, id in ipairs(ids) do
  local facts = describe_by_id(id, find_message(id, now), now)
  if facts and facts[5] and brief == '1' then
    -- The payload comes after the first line, and after the followers, whose size is named there.
    local first_line = string.match(facts[5], '^[^\n]*\n') or ''
    facts[5] = string.sub(facts[5], 1, #first_line + (string.match(first_line, '^[%d+ext]*f(%d+)') or 0))
  end
  reply[i] = facts
end
return reply
