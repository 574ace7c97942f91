-- group_turns: the positions of messages in their groups, and whose turn it is. Needs groups
-- and the key wake.

-- Move a message to a position in its group. Then call update_turns.
local function set_position(id, position, old)
  if old then redis.call('ZREM', group_members, old .. id) end
  redis.call('ZADD', group_members, 0, position .. id)
  redis.call('HSET', positions, id, position)
end

-- Make a message of a group wait, at a level. `old` is its position until now, if it has one. Then
-- call update_turns.
local function enqueue_in_group(id, group, level, due, old)
  redis.call('ZADD', group_waiting, format_score(due), id)
  set_position(id, position_of(group, level, due), old)
end

-- Take messages out of their groups, if they have any, before anything else is deleted. Return the
-- groups, for update_turns.
local function leave_groups(ids)
  local members, waiting_ids, groups = {}, {}, {}
  if #ids == 0 or redis.call('EXISTS', positions) == 0 then return groups end
  for i, position in ipairs(redis.call('HMGET', positions, unpack(ids))) do
    if position then
      members[#members + 1], waiting_ids[#waiting_ids + 1] = position .. ids[i], ids[i]
      add_group(groups, group_of(position))
    end
  end
  if #members > 0 then
    check_groups()
    redis.call('ZREM', group_members, unpack(members))
    redis.call('ZREM', group_waiting, unpack(waiting_ids))
  end
  return groups
end

-- Return the level of a message that waits after it had this position, or none.
local function level_of(group, position, priority)
  local before = position and level_and_moment(position)
  local was_out = before and (before < '0' or before > '9')
  if was_out then
    local limit = limits_of({group})[group]
    if limit and limit.ordered then return '!' end
  end
  return tostring(9 - priority)
end

-- Return when the first waiting message of a group comes due. If that has passed, it may be any
-- moment in the past.
local function first_due(group, limit, now)
  local base, soonest = group .. '\0', nil
  local from = '[' .. base .. '!'
  while from do
    local member = redis.call('ZRANGEBYLEX', group_members, from, '(' .. base .. ':', 'LIMIT', 0, 1)[1]
    if not member then return soonest end
    local level, due = level_and_moment(member)
    if due <= now or level == '!' and limit and limit.ordered then return due end
    soonest = math.min(soonest or due, due)
    from = level ~= '9' and '[' .. base .. string.char(string.byte(level) + 1)
  end
  return soonest
end

-- Return when a waiting message of a group that is not paused may be handed out, and when one of its
-- suspects may: nil if there is none.
local function next_turns(group, limit, now, may_have_suspects)
  local due, is_ordered = first_due(group, limit, now), limit and limit.ordered
  local behind = (may_have_suspects or is_ordered) and first_suspect_or_running(group)
  local suspect_turn = behind and level_and_moment(behind) == '?' and now or nil
  -- Whatever has been handed out holds an ordered group up.
  if is_ordered and behind then due = nil end
  if not limit or not (due or suspect_turn) then return due, suspect_turn end
  local from = free_from(limit, group, now, running_of, first_end_of)
  return due and math.max(due, from), suspect_turn and math.max(suspect_turn, from)
end

-- Give groups these turns, by their names. A group that is due already keeps its turn,
-- unless it was served: then it goes behind those that were served before.
local function put_turns(set, groups, moments, now, served_at)
  local added, removed, sooner, some_sooner = {}, {}, {}, false
  for i, score in ipairs(redis.call('ZMSCORE', set, unpack(groups))) do
    local group, old = groups[i], tonumber(score or nil)
    local moment, its_serving = moments[group], served_at and served_at[group]
    if not moment then
      if old then removed[#removed + 1] = group end
    elseif its_serving or not old or old > now or moment > now then
      moment = math.max(moment, its_serving or now)
      if moment ~= old then
        added[#added + 1], added[#added + 2] = format_score(moment), group
        if not its_serving and (not old or moment < old) then sooner[group], some_sooner = moment, true end
      end
    end
  end
  if #removed > 0 then redis.call('ZREM', set, unpack(removed)) end
  if #added > 0 then redis.call('ZADD', set, unpack(added)) end
  -- Tell the others only if they would wake too late otherwise.
  local first = some_sooner and redis.call('ZRANGE', set, 0, 0)[1]
  if sooner[first] then announce(sooner[first], now) end
end

-- Give groups their turns anew, after something has changed. `has_new_suspects` tells whether one
-- of them may have its first suspect; `served_at` when they were served, by their names, if they were.
local function update_turns(groups, now, has_new_suspects, served_at)
  if #groups == 0 then return end
  local may_have_suspects = has_new_suspects or redis.call('EXISTS', suspect_turns) == 1
  local limits, are_paused = limits_of(groups)
  local new_turns, new_suspect_turns = {}, {}
  for _, group in ipairs(groups) do
    if not are_paused[group] then
      new_turns[group], new_suspect_turns[group] = next_turns(group, limits[group], now, may_have_suspects)
    end
  end
  put_turns(group_turns, groups, new_turns, now, served_at)
  if may_have_suspects then put_turns(suspect_turns, groups, new_suspect_turns, now, served_at) end
end
