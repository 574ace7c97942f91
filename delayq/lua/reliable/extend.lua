-- extend: make leases end later, or earlier.
--
-- Keys:
--   leases    see include/leases.lua
--   wake      CHANNEL  where a lease that ends earlier is announced: its end, microseconds
--   settings  HASH     see include/settings.lua
-- Arguments:
--   lease_us  int   time from now, microseconds
--   alone     0 or 1  whether messages that were alone in their worker still are
--   runs      text  how many of the messages in a row have the same token, and the token of their
--                   leases: "99:token 1:token"
--   id...     text  of each message
-- Roles: consumer
-- Repeatable: yes
--
-- Returns {now_us, 1 or 0 for each message}: 0 if it is not leased under that token any more, or its
-- lease is over and its slot may have been given away, and nothing was changed.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns

local now = now_us()
local ends, given_tokens = read_leases(ids, runs, true)
local reply, extended, new_ends, kept_tokens = {now}, {}, {}, {}
local moment, moment_alone, is_earlier = end_of_lease(now, lease_us, false), end_of_lease(now, lease_us, true), false
local moments = {}
local some_details = redis.call('EXISTS', positions, expiries) > 0
local some_grouped = some_details and redis.call('EXISTS', positions) == 1
local old_positions = some_grouped and redis.call('HMGET', positions, unpack(ids)) or {}
if some_details then check_details() end
if #old_positions > 0 then check_groups() end
local limit = parse_limit(redis.call('HGET', settings, 'share'))
for i, id in ipairs(ids) do
  local old_end = tonumber(ends[i])
  if old_end and old_end <= now and (old_positions[i] or limit and limit.concurrency) then old_end = nil end
  reply[i + 1] = old_end and 1 or 0
  if old_end then
    extended[#extended + 1] = id
    moments[i] = alone == '1' and is_alone(old_end) and moment_alone or moment
    new_ends[#new_ends + 1], new_ends[#new_ends + 2] = string.format('%.0f', moments[i]), id
    kept_tokens[#kept_tokens + 1], kept_tokens[#kept_tokens + 2] = id, given_tokens[i]
    -- Leases are renewed many at a time, and end later. A lease that is to end earlier than before
    -- comes alone.
    is_earlier = #ids == 1 and moment < old_end
  end
end
if #extended == 0 then return reply end
-- First a write that may free memory: then a full server accepts the rest.
redis.call('HDEL', tokens, unpack(extended))
redis.call('ZADD', leased, unpack(new_ends))
redis.call('HSET', tokens, unpack(kept_tokens))
if some_details then
  local ids_and_ends = {}
  for i, id in ipairs(extended) do ids_and_ends[2 * i - 1], ids_and_ends[2 * i] = id, new_ends[2 * i - 1] end
  expire_after(ids_and_ends)
end
local groups = {}
for i, id in ipairs(ids) do
  local position = reply[i + 1] == 1 and old_positions[i]
  if position then
    set_position(id, position_of(group_of(position), '~', moments[i]), position)
    add_group(groups, group_of(position))
  end
end
-- The turn of a group that waits for a slot is at the end of its first lease.
update_turns(groups, now)
-- The others would wake too late otherwise.
local next_id = is_earlier and redis.call('ZRANGEBYSCORE', leased, string.format('(%.0f', now), '+inf', 'LIMIT', 0, 1)[1]
if next_id == extended[1] then announce(moment, now) end
return reply
