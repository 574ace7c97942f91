-- leased: find out which of these messages workers have, and until when.
--
-- Keys:
--   messages  see include/queue.lua
-- Arguments:
--   id...  text  of each message
-- Roles: admin, dashboard
-- Repeatable: yes
--
-- Returns for each message the end of its lease, microseconds; nil if no worker has it.
-- include: clock
-- include: queue

local now = now_us()
local reply = {}
for i = 1, #ids do reply[i] = false end
local lease_texts = redis.call('HMGET', leases, unpack(ids))
for _, priority in ipairs(used_priorities()) do
  for i, score in ipairs(redis.call('ZMSCORE', live[priority], unpack(ids))) do
    local moment = tonumber(score or 0)
    if moment > now and parse_lease(lease_texts[i]) then reply[i] = format_score(math.min(moment, MAX_SCORE)) end
  end
end
return reply
