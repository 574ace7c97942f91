-- evicted: tell whether keys of a queue are missing, as after the server has evicted some of them.
--
-- Keys:
--   messages    see include/queue.lua
--   settings    HASH  see include/settings.lua
--   kept_slots  ZSET  names of cancelled messages that keep their slots, which have positions, too
-- Roles: admin, dashboard, consumer
-- Repeatable: yes
--
-- Returns {lost, out_of_line, is_unlisted}. lost: how many messages are in some list, if none has a
-- body. out_of_line: how many of groups wait where no claim finds them. is_unlisted: 1 if there are
-- messages in no list. Nothing counts as missing while the queue is moved.
-- include: clock
-- include: leases
-- include: groups

-- Return whether a group whose messages wait has no turn, although it is not paused, and nothing
-- that runs holds it up.
local function misses_turn(group)
  if redis.call('ZSCORE', group_turns, group) or redis.call('ZSCORE', suspect_turns, group) then return false end
  local limits, are_paused = limits_of({group})
  local limit = limits[group]
  return not are_paused[group] and not (limit and limit.ordered and first_suspect_or_running(group))
end

if string.find(redis.call('HGET', settings, 'partitions') or '', '?', 1, true) then return {0, 0, 0} end
local in_groups, of_workers = redis.call('ZCOUNT', group_waiting, '-inf', '+inf'), redis.call('ZCOUNT', leased, '-inf', '+inf')
local listed = in_groups + of_workers
for priority = 0, 9 do listed = listed + redis.call('ZCOUNT', waiting[priority], '-inf', '+inf') end
-- Servers evict whole keys.
local has_bodies, out_of_line = redis.call('EXISTS', bodies) == 1, 0
if in_groups > 0 then
  local first = redis.call('ZRANGE', group_waiting, 0, 0)[1]
  local group = first and group_of(redis.call('HGET', positions, first) or '')
  if redis.call('EXISTS', positions, group_members) < 2 or group and misses_turn(group) then out_of_line = in_groups end
end
local misses_grouped = in_groups + of_workers == 0 and redis.call('HLEN', positions) > redis.call('ZCOUNT', kept_slots, '-inf', '+inf')
local is_unlisted = has_bodies and (listed == 0 or misses_grouped)
return {has_bodies and 0 or listed, out_of_line, is_unlisted and 1 or 0}
