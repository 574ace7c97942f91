-- repartition: go on with moving a queue to another number of partitions, in the first one.
--
-- Keys:
--   paused    STRING  exists while no client may take anything
--   settings  HASH    see include/settings.lua; and CHANNEL of that name, where clients are told to
--                     read the settings again
-- Arguments:
--   step    text  what to do: see below
--   token   text  names the process that moves the queue; the last one that began is the only one
--                 that goes on
--   number  int   of partitions
-- Roles: admin
-- Repeatable: yes
--
-- To begin, or to continue, gives the settings a higher epoch: see is_moved_by in include/settings.lua.
--
-- The field `moving` has, each behind a space, the new number, the phase, 1 if the queue was paused
-- before, the former number, and the token. The steps in order, each with the phase to which it
-- leads:
--   begin   drains   workers finish what they have; a move that was interrupted stays in its phase
--   close   closes   nothing can be stored; the partitions are set aside
--   move    moves    what was set aside is moved
--   resume  resumes  the new number is in force, and the pause ends
--   end     the field is deleted
-- "give up" ends a move that has not got beyond the first phase. Before it, "undo" gives the settings
-- a higher epoch, so that what the caller has sent earlier, and arrives late, pauses nothing.
--
-- Returns as configure does: "changed"; "same": the queue has this number already, or another layout;
-- "other number": it is being moved to another one; "too small"; "busy": another client changes the
-- number; or "lost": another process has taken the move over, or it has ended.
-- include: clock
-- include: settings
-- include: change

local stored, now = read_settings(), now_us()
if not stored then return settings_after('same') end
local old = number_in(stored.partitions) or '1'
local to, phase, was_paused, from, holder =
  string.match(stored.moving or '', '^(%d+) (%l+) ([01]) (%d+) (%S+)$')
local function save(next_phase)
  redis.call('HSET', settings, 'moving', table.concat({number, next_phase, was_paused, from, token}, ' '))
  return settings_after('changed')
end

if step == 'begin' then
  if to and to ~= number then return settings_after('other number') end
  if to then
    store_settings(stored, {}, 0, now)
    return save(phase)
  end
  if old == number then return settings_after('same') end
  if renumbered_by(stored, now) then return settings_after('busy') end
  if not can_share(stored.limit, number) then return settings_after('too small') end
  was_paused, from = redis.call('EXISTS', paused), old
  store_settings(stored, {}, 0, now)
  return save('drains')
end
if holder ~= token or to ~= number then return settings_after('lost') end
if step == 'undo' then
  if phase ~= 'drains' then return settings_after('lost') end
  store_settings(stored, {}, 0, now)
  return save(phase)
elseif step == 'close' then
  -- Each partition has a number of its own, so that no caller agrees on it.
  redis.call('HSET', settings, 'layout', LAYOUT, 'partitions', from .. '?')
  return save('closes')
elseif step == 'move' then
  return save('moves')
elseif step == 'resume' then
  if phase == 'moves' then store_settings(stored, {partitions = number}, 0, now) end
  return save('resumes')
end
if step == 'end' or phase == 'drains' then redis.call('HDEL', settings, 'moving') end
return settings_after('changed')
