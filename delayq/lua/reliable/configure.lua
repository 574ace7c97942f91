-- configure: declare or change settings of a queue, in its first partition.
--
-- Keys:
--   settings  HASH  see include/settings.lua; and CHANNEL of that name, where clients are told to
--                   read the settings again
-- Arguments:
--   mode      text  "declare": keep what is stored, and add what is not; "change": replace it
--   above     text  an epoch that a copy has: these settings get a higher one; empty: none
--   field...  text  the name of each setting
--   value...  text  the setting
-- Roles: producer, consumer, admin
-- Repeatable: yes
--
-- Returns what became of it, and the settings that are stored now, as include/change.lua orders
-- them: "changed"; "same": they were like that, or have the layout of another release; "other
-- number": a change would give the queue another number of partitions, "too small": the limit is
-- smaller than that number, or "busy": the queue is moved to other partitions; then nothing was
-- changed.
-- include: clock
-- include: settings
-- include: change

local stored, now = read_settings(), now_us()
if not stored then return settings_after('same') end
if stored.moving then return settings_after('busy') end
local number, new = number_in(stored.partitions), {}
local is_new = above ~= '' and parse_epoch(above) >= parse_epoch(stored.epoch)
if number and number ~= stored.partitions and not renumbered_by(stored, now) then
  -- The client that was about to change the number has died, or hangs.
  new.partitions, is_new = number, true
end
for at = FIRST, #ARGV, STRIDE do
  local field, value = ARGV[at + FIELD], ARGV[at + VALUE]
  if field == 'partitions' then
    if number and number ~= value and mode == 'change' then return settings_after('other number') end
    if not number then new.partitions, is_new = value, true end
  elseif stored[field] ~= value and (mode == 'change' or not stored[field]) then
    new[field], is_new = value, true
  end
end
if not is_new then return settings_after('same') end
if (new.limit or new.partitions) and not can_share(new.limit or stored.limit, new.partitions or number or '1') then
  return settings_after('too small')
end
store_settings(stored, new, parse_epoch(above), now)
return settings_after('changed')
