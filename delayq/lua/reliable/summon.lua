-- summon: call dormant clients, because more messages are due than those that listen can take.
--
-- Keys:
--   messages  see include/queue.lua
--   summons  CHANNEL  where dormant clients listen: how many of them are needed; and STRING of that
--                     name, see include/summons.lua
-- Arguments:
--   share    int  how many messages one client takes
--   at_hand  int  how many clients can take them without being called
-- Roles: consumer
-- Repeatable: yes
--
-- Returns how many clients were told.
-- include: clock
-- include: leases
-- include: queue
-- include: summons

local now = format_score(now_us())
local due = redis.call('ZCOUNT', leased, '-inf', now)
for _, where in ipairs(used_sets()) do
  due = due + redis.call('ZCOUNT', waiting[where], '-inf', now)
end
return give_summons(math.ceil(due / tonumber(share)) - tonumber(at_hand))
