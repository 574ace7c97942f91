-- set_aside: put everything in a partition aside, so that it can be moved to other partitions and
-- nothing changes it meanwhile.
--
-- Keys:
--   lease_ends  ZSET  `leased` of include/leases.lua
--   slot_ends   ZSET  `kept_slots` of include/kept_slots.lua
--   settings    HASH  see include/settings.lua
--   key...      any   each key that has anything that was placed by the number of partitions,
--                     followed by the name that it gets
-- Arguments:
--   epoch   text  of the settings since the caller began, or continued, the move
--   number  text  of partitions that the settings get: no caller agrees on it
-- Roles: admin
-- Repeatable: yes
--
-- Returns the number of messages that workers have, or that were cancelled and whose handlers still
-- run: if there are any, nothing was changed. An error, DELAYQ_SETTINGS, if another process has taken
-- the move over; then nothing was changed either.
-- include: clock
-- include: settings

if not is_moved_by(epoch) then return settings_changed() end
local now = string.format('(%.0f', now_us())
local running = redis.call('ZCOUNT', lease_ends, now, '+inf') + redis.call('ZCOUNT', slot_ends, now, '+inf')
if running > 0 then return running end
-- A second call has nothing to do. A server that failed over before it had this has not renamed the
-- keys either.
if redis.call('HGET', settings, 'aside') then return 0 end
redis.call('HSET', settings, 'layout', LAYOUT, 'partitions', number, 'aside', '1')
for i = 1, #keys, 2 do
  if redis.call('EXISTS', keys[i]) == 1 then redis.call('RENAME', keys[i], keys[i + 1]) end
end
return 0
