-- pause_for_move: pause a partition while the queue is moved to another number of partitions, and end
-- the pause.
--
-- Keys:
--   paused    STRING   exists while no client may take anything: since when, ms
--   settings  HASH     see include/settings.lua
--   wake      CHANNEL  where workers listen
-- Arguments:
--   epoch  text  of the settings since the caller began, or continued, the move
--   step   text  "pause"; "resume"; "stay": the queue was paused before, and stays so; or
--                "retire": the partition is no longer used. Only the epoch stays, so that nobody
--                stores anything here who knows older settings
-- Roles: admin
-- Repeatable: yes
--
-- Returns 1. An error, DELAYQ_SETTINGS, if another process has taken the move over, or it has ended;
-- then nothing was changed.
-- include: clock
-- include: settings

if not is_moved_by(epoch) then return settings_changed() end
-- Whether the user may set an end is tried before the first write; deletions are not.
if step == 'pause' then
  -- The time of an earlier pause stays.
  redis.call('SET', paused, string.format('%.0f', math.floor(now_us() / 1000)), 'NX')
  -- No batch begins meanwhile: see join_batch.lua.
  redis.call('HSET', settings, 'draining', '1')
  return 1
end
redis.call('HDEL', settings, 'draining')
if step ~= 'stay' and redis.call('PEXPIRE', paused, 0) == 1 and step == 'resume' then
  -- A hint: workers poll every few seconds as well.
  redis.pcall('PUBLISH', wake, string.format('%.0f', now_us()))
end
if step == 'retire' then
  redis.call('PEXPIRE', settings, 0)
  redis.call('HSET', settings, 'epoch', epoch)
end
return 1
