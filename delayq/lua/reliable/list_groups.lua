-- list_groups: look at groups that have messages, or settings of their own, by name.
--
-- Keys:
--   leases      see include/leases.lua
--   settings    HASH  see include/groups.lua
--   kept_slots  ZSET  see include/kept_slots.lua
-- Arguments:
--   first  text  the name at which to begin
--   after  0 or 1  whether to leave that one out
--   limit  int   this many at most
-- Roles: admin, dashboard
-- Repeatable: yes
--
-- Returns for each group {name, waiting, due, running, next, limit, has_own, is_paused}. due: how many
-- of those that wait are due. next: the moment at which one of its messages may be handed out as far
-- as its own limit goes, microseconds; empty if none is foreseen. limit: its own, or that of all
-- groups; empty if there is none. has_own: whether it is its own.
-- include: clock
-- include: leases
-- include: groups
-- include: at_rest

local now, reply = now_us(), {}
-- How many slots are kept beyond the end of their leases, which the next claim frees, by group.
local expired_slots = {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', kept_slots, '-inf', now, 'LIMIT', 0, 100)) do
  local group = group_of(redis.call('HGET', positions, name) or '')
  expired_slots[group] = (expired_slots[group] or 0) + 1
end

-- Return how many messages of a group wait at a level, and are due.
local function due_at(group, level)
  local to = '(' .. position_of(group, level, now) .. '\255'
  return redis.call('ZLEXCOUNT', group_members, '[' .. group .. '\0' .. level, to)
end

local function due_of(group)
  local due = due_at(group, '!') + due_at(group, '9') + due_at(group, '?')
  -- Mostly, no message has a priority.
  if redis.call('ZLEXCOUNT', group_members, '[' .. group .. '\0000', '(' .. group .. '\0009') > 0 then
    for level = 0, 8 do due = due + due_at(group, level) end
  end
  return due
end

local from = after == '1' and '(' .. first .. '\0\255' or '[' .. first
for i = 1, tonumber(limit) do
  local member = redis.call('ZRANGEBYLEX', group_members, from, '+', 'LIMIT', 0, 1)[1]
  if not member then break end
  local group = group_of(member)
  local all = redis.call('ZLEXCOUNT', group_members, '[' .. group .. '\0!', '(' .. group .. '\0\127')
  local running = running_of(group, now)
  local turn, suspect_turn = redis.call('ZSCORE', group_turns, group), redis.call('ZSCORE', suspect_turns, group)
  local soonest = math.min(tonumber(turn or nil) or MAX_SCORE, tonumber(suspect_turn or nil) or MAX_SCORE)
  local own, usual = unpack(redis.call('HMGET', settings, 'group:' .. group, 'group_limit'))
  local its_own = own and string.match(own, '=(.*)$')
  reply[i] = {
    group, all - running - (expired_slots[group] or 0), due_of(group), running, soonest < MAX_SCORE and format_score(soonest) or '',
    its_own or usual or '', its_own and 1 or 0, own and string.sub(own, 1, 1) == 'z' and 1 or 0,
  }
  from = '(' .. after_group(group, member)
end
return reply
