-- drop: drop what was set aside in a partition, and was stored where it belongs.
--
-- Keys:
--   settings  HASH          see include/settings.lua
--   target    ZSET or HASH  the key
-- Arguments:
--   epoch      text  of the settings since the caller began, or continued, the move
--   kind       text  "members" of a sorted set, or "fields" of a hash
--   member...  text  each member or field
-- Roles: admin
-- Repeatable: yes
--
-- Returns 1. An error, DELAYQ_SETTINGS, if another process has taken the move over, or it has ended;
-- then nothing was changed.
-- include: settings

if not is_moved_by(epoch) then return settings_changed() end
if kind == 'members' then redis.call('ZREM', target, unpack(members)) end
if kind == 'fields' then redis.call('HDEL', target, unpack(members)) end
return 1
