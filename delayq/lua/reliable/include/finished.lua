-- finished: delete the messages that finishing.lua has found, and keep a record of each. Needs
-- groups and group_turns.

local waits_for_slot = awaits_slot()
-- First the writes that free memory: then a full server accepts the rest.
local groups = leave_groups(finished)
redis.call('ZREM', leased, unpack(finished))
delete_details(finished)
update_turns(waiting_for_slots(groups, now, redis.call('EXISTS', suspect_turns) == 1), now)
if waits_for_slot then free_slot(now) end
if remember_us > 0 then
  trim_remembered(now)
  remember(finished, now + remember_us, now)
end
if keep_us > 0 then save_records(new, keep_us, most, now) end
if some_await then
  for i, ends_us in ipairs(redis.call('ZMSCORE', awaited, unpack(finished))) do
    if ends_us then
      announce_finished(finished[i])
      redis.call('ZREM', awaited, finished[i])
    end
  end
end
