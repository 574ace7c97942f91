-- settings: the settings of the queue. See docs/redis-data-model.md.
--
-- The key `settings` is a HASH of the FIELDS in include/change.lua, and of these, which each partition
-- has for itself:
--
--   share             the part of the limit that this partition has
--   turns_updated_to  exists after the limits have changed, until claims have given every group its
--                     turn by them: the member of `group_members` that they have reached
--   group:<name>      the settings of a group: see include/groups.lua
--   ungrouped_turn    when a message without a group was last handed out while a group was due
--   aside             exists while the queue is moved and what was here has been put aside
--   draining          exists while the queue is about to be moved, and no batch may begin
--
-- A setting that is missing or cannot be read was never given. Those of the first partition decide;
-- the others have copies.

-- The layout of the keys that these scripts read and write.
local LAYOUT = '2'

-- Return whether messages may be stored by a caller that has placed them by this number of
-- partitions.
local function agrees_on(partitions, stored_layout, stored_partitions)
  return stored_layout == LAYOUT and stored_partitions == partitions
end

-- Return whether the caller may change a partition because it moves the queue to another number of
-- partitions. Each process that begins or continues a move, or ends it, gives the settings a higher
-- epoch, first in every partition. So whoever was stopped, and goes on when another process has
-- taken over, changes nothing.
local function is_moved_by(epoch)
  return redis.call('HGET', settings, 'epoch') == epoch
end

-- The error for a caller that has to read the settings again. Nothing has been written.
local function settings_changed()
  return redis.error_reply('DELAYQ_SETTINGS the settings of the queue have changed')
end
