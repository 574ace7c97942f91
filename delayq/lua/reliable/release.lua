-- release: return messages that were handed out and not handled. They wait again as before, and no
-- attempt is counted.
--
-- Keys:
--   messages    see include/queue.lua
--   wake        CHANNEL  where a new head is announced: its due time, microseconds
--   settings    HASH     see include/settings.lua
--   kept_slots  ZSET     names of cancelled messages that keep their slots, scored by the end of
--                        their leases, microseconds: see include/kept_slots.lua
-- Arguments:
--   id...     text  of each message
--   token...  text  of its lease
--   start...  text  empty if a handler may have begun it; otherwise, when it was handed out,
--                   microseconds, if a rate has counted that, and 0 if none has: then it has not
--                   started, and if it was cancelled, its slots are free
-- Roles: consumer
-- Repeatable: no
--
-- Returns for each message: 1, or 0 if it is not leased under that token any more.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue
-- include: kept_slots
-- include: rate_log

local now = now_us()
local reply, ours, cancelled, counts = {}, {}, {}, {}
for at = FIRST, #ARGV, STRIDE do
  local id, token, start = ARGV[at + ID], ARGV[at + TOKEN], ARGV[at + START]
  local is_ours = lease_end(id, token) ~= nil
  reply[#reply + 1] = is_ours and 1 or 0
  if is_ours then
    ours[#ours + 1] = id
    if number_or(0, start) > 0 then note_unstarted(counts, id, start) end
  elseif start ~= '' and redis.call('ZSCORE', kept_slots, name_of(id, token)) then
    cancelled[#cancelled + 1] = name_of(id, token)
  end
end
-- A key of a foreign type must fail before the first write.
if COUNT > 1 or #counts + #cancelled > 0 then check_messages() end
if #counts > 0 then take_back_starts(counts) end
for _, id in ipairs(ours) do give_back(id, now) end
if #cancelled > 0 then free_slots(cancelled, now) end
return reply
