-- configure: store the settings of a queue, or of one of its partitions, unless other ones were
-- stored meanwhile.
--
-- Keys:
--   settings  HASH  see include/settings.lua; and CHANNEL of that name, where clients are told to
--                   read the settings again
-- Arguments:
--   expected  text  the epoch of the settings that these replace; 0 if none was ever stored; empty
--                   if nothing else was stored either
--   epoch     text  of these settings
--   field...  text  the name of each setting
--   value...  text  the setting
-- Roles: producer, consumer, admin
-- Repeatable: yes
--
-- Returns the epoch that is stored now. If it is not that of these settings, nothing was changed. If
-- limits have changed, `settled_to` has the next claims give all groups their turns anew.
-- include: settings

local stored = redis.call('HMGET', settings, 'layout', 'epoch', 'group_limit', 'share')
-- If the answer to a first try was lost, its repetition finds its work done.
local is_expected = knows_settings(stored[1], stored[2], expected)
if expected == '' then is_expected = not stored[1] and not stored[2] end
if not is_expected then return stored[2] or '0' end
local fields, given = {'layout', LAYOUT, 'epoch', epoch}, {}
for at = FIRST, #ARGV, STRIDE do
  local field, value = ARGV[at + FIELD], ARGV[at + VALUE]
  fields[#fields + 1], fields[#fields + 2], given[field] = field, value, value
end
local function is_new(limit, old) return (limit or '0') ~= (old or '0') end
if is_new(given.group_limit, stored[3]) or is_new(given.share, stored[4]) then
  fields[#fields + 1], fields[#fields + 2] = 'settled_to', ''
end
-- Fields of settings that are withdrawn must not stay.
redis.call('HDEL', settings, 'partitions', 'former', 'max_size', 'expired', 'dedup_window', 'keep_dead', 'max_dead', 'keep', 'max_kept', 'limit', 'group_limit', 'share')
redis.call('HSET', settings, unpack(fields))
-- A hint: a client that does not hear it is refused, and reads the settings then.
redis.pcall('PUBLISH', settings, epoch)
return epoch
