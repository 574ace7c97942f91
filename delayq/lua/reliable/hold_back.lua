-- hold_back: pause a partition for a process that moves the queue to another number of partitions,
-- and let it store there what was set aside.
--
-- Keys:
--   paused    STRING  exists while no client may take anything
--   settings  HASH    see include/settings.lua; `mover` names the process
-- Arguments:
--   epoch  text  of the settings when the process began, or continued, the move
--   token  text  names the process; empty if it only pauses
-- Roles: admin
-- Repeatable: yes
--
-- Returns 1. An error, DELAYQ_SETTINGS, if the settings are newer: the move has ended meanwhile, and
-- nothing was changed.
-- include: settings

local stored_epoch = tonumber(redis.call('HGET', settings, 'epoch') or nil)
if stored_epoch and stored_epoch > (tonumber(epoch) or 0) then return settings_changed() end
redis.call('SET', paused, '1')
if token ~= '' then redis.call('HSET', settings, 'mover', token) end
return 1
