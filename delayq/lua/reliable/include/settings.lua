-- settings: the settings of the queue. See docs/redis-data-model.md.
--
-- The key `settings` is a HASH: layout, epoch, partitions, former, max_size, expired, dedup_window,
-- keep_dead, max_dead, keep, max_kept, limit, group_limit; share: the part of the limit that this
-- partition has; settled_to: exists after these limits have changed, until claims have given every
-- group its turn by them: the member of `lines` that they have reached; see include/groups.lua.
-- A field that is missing or cannot be read means that the setting was never given. Each partition
-- has a copy; that of the first partition decides.

-- The layout of the keys that these scripts read and write.
local LAYOUT = '2'

-- Return whether the caller knows the settings that are stored; it may know none if none is stored.
local function knows_settings(layout, stored_epoch, epoch)
  return (layout or LAYOUT) == LAYOUT and (stored_epoch or '0') == epoch
end

-- The error for a caller that has to read the settings again. Nothing has been written.
local function settings_changed()
  return redis.error_reply('DELAYQ_SETTINGS the settings of the queue have changed')
end
