-- get: look at messages.
--
-- Keys:
--   messages  see include/queue.lua
-- Arguments:
--   id...  text  of each message
-- Roles: admin, dashboard
-- Repeatable: yes
--
-- Returns for each message {state, priority, moment, attempt, body, error}, or nil if there is
-- none. moment: the due time, or the end of the lease, microseconds.
-- include: clock
-- include: leases
-- include: queue

local now = now_us()
local reply = {}
for i, id in ipairs(ids) do
  local found, record = find_message(id, now), parse_record(redis.call('HGET', attempts, id))
  local body, error = redis.call('HGET', bodies, id), redis.call('HGET', errors, id)
  local is_live = found and not found.expired
  reply[i] = is_live and describe(found, now, record, priority_of(id), body, error) or false
end
return reply
