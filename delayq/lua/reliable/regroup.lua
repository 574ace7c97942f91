-- regroup: give groups their turns anew, because limits have changed, a bounded number of groups.
--
-- Keys:
--   leases    see include/leases.lua
--   wake      CHANNEL  where a group that may run earlier is announced: when, microseconds
--   settings  HASH     see include/settings.lua
-- Arguments:
--   after  text  the group that the last call came to; empty at first
--   limit  int   as many groups at most
-- Roles: producer, consumer, admin
-- Repeatable: yes
--
-- Returns the last group, or an empty text if no more are left.
-- include: clock
-- include: leases
-- include: groups

check_groups()
local now = now_us()
-- The next claim finds out whether the queue still has to wait.
if awaits_slot() then free_slot(now) end
for _ = 1, tonumber(limit) do
  local from = after == '' and '-' or '(' .. after .. '\0\255'
  local member = redis.call('ZRANGEBYLEX', lines, from, '+', 'LIMIT', 0, 1)[1]
  if not member then return '' end
  after = group_of(member)
  settle({after}, now, true)
end
return after
