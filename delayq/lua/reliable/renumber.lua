-- renumber: give a queue that has nothing in it another number of partitions, in the first one.
--
-- Keys:
--   vacancy   see include/vacancy.lua
--   settings  HASH  see include/settings.lua; and CHANNEL of that name, where clients are told to
--                   read the settings again
-- Arguments:
--   step      text  "close": refuse offers, so that the other partitions can be vacated; "commit":
--                   store the settings; "reopen": give up
--   token     text  names the client that does it
--   number    text  of partitions
--   field...  text  the name of each further setting
--   value...  text  the setting
-- Roles: admin
-- Repeatable: yes
--
-- Returns as configure does: "changed"; "same"; "closed": vacate the other partitions, then commit;
-- "busy": another client does it; "lost": offers are accepted again, so begin anew; "in use":
-- something is in the partition; or "too small". Only after "changed", the settings are new.
-- include: clock
-- include: leases
-- include: settings
-- include: change
-- include: vacancy

local stored, now = read_settings(), now_us()
if not stored then return settings_after('same') end
if stored.moving then return settings_after('busy') end
local old, new = number_in(stored.partitions), {partitions = number}
if not old then return settings_after('lost') end
local holder = renumbered_by(stored, now)
if step == 'reopen' then
  if holder == token then store_settings(stored, {partitions = old}, 0, now) end
  return settings_after('same')
end
if holder and holder ~= token then return settings_after('busy') end
-- The reply to the first try was lost.
if old == number and not holder then return settings_after('same') end
if step == 'commit' and not holder then return settings_after('lost') end
if not is_vacant(now) then return settings_after('in use') end
for at = FIRST, #ARGV, STRIDE do
  local field, value = ARGV[at + FIELD], ARGV[at + VALUE]
  new[field] = value
end
if not can_share(new.limit or stored.limit, number) then return settings_after('too small') end
-- A single partition is the only one to be vacated.
if step == 'close' and old ~= '1' then
  redis.call('HSET', settings, 'partitions', old .. '?', 'renumbering', token .. ' ' .. string.format('%.0f', now))
  return settings_after('closed')
end
store_settings(stored, new, 0, now)
return settings_after('changed')
