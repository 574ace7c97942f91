-- ack: delete messages that have been handled.
--
-- Keys:
--   leases      see include/leases.lua
--   wake        CHANNEL  where a free slot is announced, microseconds
--   remembered  ZSET     ids that count as taken, scored by the end of that time, microseconds
--   settings    HASH     see include/settings.lua
-- Arguments:
--   runs   text  how many of the messages in a row have the same token, and the token of their
--                leases: "99:token 1:token"
--   id...  text  of each message
-- Roles: consumer
-- Repeatable: no
--
-- Returns for each message: 1, or 0 if it is not leased under that token any more, and nothing was
-- changed.
-- include: clock
-- include: leases

local some_details = redis.call('EXISTS', suspect_turns, sparse_hashes())
local some_grouped = some_details > 0 and redis.call('EXISTS', positions) == 1
local only_grouped = some_grouped and some_details == 1
local ends = read_leases(ids, runs, some_details > 0 and not only_grouped)
local reply, acked, count = {}, {}, 0
for i, id in ipairs(ids) do
  reply[i] = ends[i] and 1 or 0
  if ends[i] then
    count = count + 1
    acked[count] = id
  end
end
if count == 0 then return reply end
local remember_us, limit = unpack(redis.call('HMGET', settings, 'dedup_window', 'share'))
remember_us = number_or(0, remember_us)
-- A key of a foreign type must fail before the first write.
if some_details > 0 and not only_grouped then check_details() end
if remember_us > 0 then redis.call('ZSCORE', remembered, '') end
-- Most queues have neither groups nor a limit, and do not even create these functions.
if some_grouped or limit and limit ~= '' then
-- include: groups
  local members, groups, now, last_position = {}, {}, now_us(), nil
  local waits_for_slot = string.find(limit or '', '[co]') and awaits_slot()
  for i, position in ipairs(some_grouped and redis.call('HMGET', positions, unpack(acked)) or {}) do
    if position then
      members[#members + 1] = position .. acked[i]
      -- Those of one claim and group have the same position.
      if position ~= last_position then add_group(groups, group_of(position)) end
      last_position = position
    end
  end
  if #members > 0 then
    local groups_to_update = waiting_for_slots(groups, now, not only_grouped)
    if #groups_to_update > 0 then check_groups() end
    redis.call('ZREM', group_members, unpack(members))
    if #groups_to_update > 0 then
-- include: group_turns
      update_turns(groups_to_update, now)
    end
  end
  if waits_for_slot then free_slot(now) end
end
if redis.call('ZREM', leased, unpack(acked)) < count then
  -- Some were named twice: the second time, they were gone.
  local seen = {}
  for i, id in ipairs(ids) do
    if seen[id] then reply[i] = 0 end
    seen[id] = seen[id] or ends[i]
  end
end
if some_details > 0 and not only_grouped then
  delete_details(acked)
else
  redis.call('HDEL', bodies, unpack(acked))
  if only_grouped then redis.call('HDEL', positions, unpack(acked)) end
end
if remember_us > 0 then
  local now = now_us()
  trim_remembered(now)
  remember(acked, now + remember_us, now)
end
return reply
