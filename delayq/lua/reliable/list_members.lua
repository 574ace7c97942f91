-- list_members: list messages of a batch that are in one state, by their ids.
--
-- Keys:
--   settings       HASH  see include/settings.lua
--   records        HASH  of include/records.lua
--   batch_members  ZSET  of include/batches.lua
-- Arguments:
--   batch  text  its id
--   state  text  "o", "h", "d", "c" or "f": see include/batches.lua
--   after  text  list those behind this id; empty: from the first one
--   limit  int   list at most this many
-- Roles: producer, consumer, admin, dashboard
-- Repeatable: yes
--
-- Returns {id, record, ...}: see include/records.lua. record: false if there is none.
-- include: clock
-- include: leases
-- include: batches
-- include: at_rest

local base, reply = batch .. '\0' .. state .. '\0', {}
local _, to = range_of(batch, state)
for i, member in ipairs(redis.call('ZRANGEBYLEX', batch_members, '(' .. base .. after, to, 'LIMIT', 0, limit)) do
  local id = string.sub(member, #base + 1)
  reply[2 * i - 1], reply[2 * i] = id, redis.call('HGET', records, id)
end
return reply
