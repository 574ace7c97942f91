-- copy_settings: give a partition a copy of the queue's settings, unless it has a newer one.
--
-- Keys:
--   settings  HASH  see include/settings.lua; and CHANNEL of that name, where clients are told that
--                   limits may have changed here
-- Arguments:
--   partition  int  the partition's number
--   epoch     text  of the settings
--   field...  text  the name of each setting
--   value...  text  the setting
-- Roles: producer, consumer, admin
-- Repeatable: yes
--
-- Returns the epoch of the copy that is there now. An error, DELAYQ_SETTINGS, if it has the layout of
-- another release.
-- include: clock
-- include: settings
-- include: change

local stored = read_settings()
if not stored then return settings_changed() end
if parse_epoch(stored.epoch) >= parse_epoch(epoch) then return stored.epoch or '0' end
local fields, new = {'layout', LAYOUT, 'epoch', epoch}, {}
for at = FIRST, #ARGV, STRIDE do
  local field, value = ARGV[at + FIELD], ARGV[at + VALUE]
  fields[#fields + 1], fields[#fields + 2], new[field] = field, value, value
end
add_share(fields, new.limit, new.group_limit, number_in(new.partitions), tonumber(partition))
-- A setting that was withdrawn must not stay.
redis.call('HDEL', settings, 'share', unpack(FIELDS))
redis.call('HSET', settings, unpack(fields))
redis.pcall('PUBLISH', settings, epoch)
return epoch
