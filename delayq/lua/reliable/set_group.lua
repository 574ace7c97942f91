-- set_group: pause a group, resume it, or give it a limit of its own.
--
-- Keys:
--   leases    see include/leases.lua
--   wake      CHANNEL  where a group that may run earlier is announced: when, microseconds
--   settings  HASH     see include/settings.lua
-- Arguments:
--   partitions  int   the number of partitions by which the caller has found this one
--   group       text  its name
--   what        text  "pause", "resume" or "limit"
--   limit       text  for "limit": its own, or empty for that of all groups
-- Roles: admin
-- Repeatable: yes
--
-- Returns 1 if the group was paused, or else 0. An error, DELAYQ_SETTINGS, if the queue has another
-- number of partitions.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: settings

if not agrees_on(partitions, unpack(redis.call('HMGET', settings, 'layout', 'partitions'))) then
  return settings_changed()
end
check_groups()
local field = 'group:' .. group
local own = redis.call('HGET', settings, field) or ''
local was_paused = string.sub(own, 1, 1) == 'z'
local text = string.match(own, '=.*$') or ''
if what == 'limit' then text = limit == '' and '' or '=' .. limit end
if what == 'pause' or what == 'limit' and was_paused then text = 'z' .. text end
-- A member of its own keeps the group among those that are listed.
if text == '' then
  redis.call('HDEL', settings, field)
  redis.call('ZREM', group_members, group .. '\0\127')
else
  redis.call('HSET', settings, field, text)
  redis.call('ZADD', group_members, 0, group .. '\0\127')
end
update_turns({group}, now_us(), true)
return was_paused and 1 or 0
