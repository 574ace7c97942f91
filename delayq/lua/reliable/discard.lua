-- discard: drop all that was set aside in a partition, because everything is where it belongs.
--
-- Keys:
--   settings  HASH  see include/settings.lua
--   key...    any   each key that was set aside
-- Arguments:
--   epoch  text  of the settings since the caller began, or continued, the move
-- Roles: admin
-- Repeatable: yes
--
-- Returns 1. An error, DELAYQ_SETTINGS, if another process has taken the move over, or it has ended;
-- then nothing was changed.
-- include: settings

if not is_moved_by(epoch) then return settings_changed() end
redis.call('UNLINK', unpack(keys))
return 1
