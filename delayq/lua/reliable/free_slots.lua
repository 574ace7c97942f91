-- free_slots: free the slots of messages that were cancelled while a worker had them, because their
-- handlers have ended.
--
-- Keys:
--   messages    see include/queue.lua
--   wake        CHANNEL  where a free slot is announced, microseconds
--   settings    HASH     see include/settings.lua
--   kept_slots  ZSET     names of cancelled messages that keep their slots, scored by the end of
--                        their leases, microseconds: see include/kept_slots.lua
-- Arguments:
--   id...     text  of each message
--   token...  text  of its lease
-- Roles: consumer
-- Repeatable: yes
--
-- Returns the number of messages that had kept their slots.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue
-- include: kept_slots

-- A key of a foreign type must fail before the first write.
check_messages()
redis.call('HGET', settings, 'group_limit')
local names = {}
for at = FIRST, #ARGV, STRIDE do
  local name = name_of(ARGV[at + ID], ARGV[at + TOKEN])
  if redis.call('ZSCORE', kept_slots, name) then names[#names + 1] = name end
end
if #names > 0 then free_slots(names, now_us()) end
return #names
