-- list_groups: look at groups that have messages, or settings of their own, by name.
--
-- Keys:
--   leases      see include/leases.lua
--   settings    HASH  see include/settings.lua
--   kept_slots  ZSET  see include/kept_slots.lua
-- Arguments:
--   first  text  the name at which to begin
--   after  0 or 1  whether to leave that one out
--   limit  int   this many at most
-- Roles: admin, dashboard
-- Repeatable: yes
--
-- Returns for each group {name, waiting, due, running, next, limit, has_own, is_paused, oldest}. due: how
-- many of those that wait are due. oldest: the due time of the oldest of these; empty if there are none.
-- next: the moment at which one of its messages may be handed out as far
-- as its own limit goes, microseconds; empty if none is foreseen. limit: its own, or that of all
-- groups; empty if there is none. has_own: whether it is its own.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: at_rest

local now, reply = now_us(), {}
-- Until claims have reached a group after a change of limits, it has its turn by the former ones.
local has_new_limits = redis.call('HEXISTS', settings, 'turns_updated_to') == 1
-- How many slots are kept beyond the end of their leases, which the next claim frees, by group.
local expired_slots = {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', kept_slots, '-inf', now, 'LIMIT', 0, 100)) do
  local group = group_of(redis.call('HGET', positions, name) or '')
  expired_slots[group] = (expired_slots[group] or 0) + 1
end

-- Return how many messages of a group are due, and since when the oldest of them is: nil if none is.
local function due_of(group)
  local levels, due, oldest = {'!', '9', '?'}, 0, nil
  -- Mostly, no message has a priority.
  if redis.call('ZLEXCOUNT', group_members, '[' .. group .. '\0000', '(' .. group .. '\0009') > 0 then
    for level = 0, 8 do levels[#levels + 1] = level end
  end
  for _, level in ipairs(levels) do
    local from, to = '[' .. group .. '\0' .. level, '(' .. position_of(group, level, now) .. '\255'
    local count = redis.call('ZLEXCOUNT', group_members, from, to)
    if count > 0 then
      local member = redis.call('ZRANGEBYLEX', group_members, from, to, 'LIMIT', 0, 1)[1]
      local _, moment = level_and_moment(member)
      due, oldest = due + count, math.min(oldest or moment, moment)
    end
  end
  return due, oldest
end

-- Return when a message of a group may be handed out as far as its limit goes: MAX_SCORE if that is
-- not foreseen.
local function next_turn(group, limit, is_paused, oldest)
  if has_new_limits and is_paused then return MAX_SCORE end
  local turn, suspect_turn
  if has_new_limits then
    turn, suspect_turn = next_turns(group, parse_limit(limit), now, true)
  else
    turn, suspect_turn = redis.call('ZSCORE', group_turns, group), redis.call('ZSCORE', suspect_turns, group)
  end
  local soonest = math.min(tonumber(turn or nil) or MAX_SCORE, tonumber(suspect_turn or nil) or MAX_SCORE)
  -- Callers compare it with a clock that they have read before.
  return soonest <= now and oldest or soonest
end

local from = after == '1' and '(' .. first .. '\0\255' or '[' .. first
for i = 1, tonumber(limit) do
  local member = redis.call('ZRANGEBYLEX', group_members, from, '+', 'LIMIT', 0, 1)[1]
  if not member then break end
  local group = group_of(member)
  local all = redis.call('ZLEXCOUNT', group_members, '[' .. group .. '\0!', '(' .. group .. '\0\127')
  local running = running_of(group, now)
  local own, usual = unpack(redis.call('HMGET', settings, 'group:' .. group, 'group_limit'))
  local its_own, is_paused = own and string.match(own, '=(.*)$'), own and string.sub(own, 1, 1) == 'z'
  local due, oldest = due_of(group)
  local soonest = next_turn(group, its_own or usual, is_paused, oldest)
  reply[i] = {
    group, all - running - (expired_slots[group] or 0), due, running, soonest < MAX_SCORE and format_score(soonest) or '',
    its_own or usual or '', its_own and 1 or 0, is_paused and 1 or 0,
    oldest and format_score(oldest) or '',
  }
  from = '(' .. after_group(group, member)
end
return reply
