-- release_call: return the messages of a claim whose reply was lost, and keep it from handing out
-- any if it has not arrived yet.
--
-- Keys:
--   messages    see include/queue.lua
--   wake        CHANNEL  where a new head is announced: its due time, microseconds
--   settings    HASH     see include/settings.lua
--   kept_slots  ZSET     names of cancelled messages that keep their slots, scored by the end of
--                        their leases, microseconds: see include/kept_slots.lua
--   call        STRING   number of this client's last claim, the token of its leases, and the
--                        moment of its starts if a rate has counted them
-- Arguments:
--   number  int  of the claim
-- Roles: consumer
-- Repeatable: yes
--
-- Returns the number of messages.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue
-- include: kept_slots
-- include: rate_log

local now, ids, cancelled, counts = now_us(), {}, {}, {}
local last_number, token, start = string.match(redis.call('GET', call) or '', '^(%d+) ?(%d*) ?(%d*)$')
-- A later claim means that this call was repeated, and answered.
if number_or(0, last_number) > tonumber(number) then return 0 end
if last_number == number and token ~= '' then
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', leased, token, token)) do
    if lease_end(id, token) then
      ids[#ids + 1] = id
      if start ~= '' then note_unstarted(counts, id, start) end
    end
  end
  -- Nothing has begun.
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', kept_slots, token, token)) do
    if string.sub(name, -#token - 1) == '\0' .. token then cancelled[#cancelled + 1] = name end
  end
end
check_messages()
-- First a write that takes no memory: then a full server accepts the rest.
redis.call('PEXPIRE', call, 120000)
if #counts > 0 then take_back_starts(counts) end
for _, id in ipairs(ids) do give_back(id, now) end
if #cancelled > 0 then free_slots(cancelled, now) end
redis.call('SET', call, number, 'PX', 120000)
return #ids
