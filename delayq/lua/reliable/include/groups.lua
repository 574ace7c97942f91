-- groups: whose turn it is. Needs clock and leases, and the keys settings and wake. See
-- docs/redis-data-model.md.
--
-- The place of a message of a group is the group, a NUL, a level, and a moment of 19 characters.
-- Places sort by group, then by level, then by moment, in `lines`, where the id follows each. The
-- levels in order:
--   !  waits, and holds its group up: the group is ordered, and the message was handed out before
--   0 to 9  waits; 9 less its priority. These moments are the due times
--   ?  waits as a suspect, since the end of its lease
--   ~  a worker has it, until the end of its lease; or it is a suspect that no claim has found yet
-- A group that has settings of its own also has a member that ends after the NUL with a DEL.
-- So the next message of a group, the number of its running ones and the end of their first lease
-- are each one look, and a lease that ends frees its slot by itself.
--
-- `turns` and `trials` have the groups of which a message may be handed out some time, scored by
-- that moment: a message that waits, and a suspect. The limits of the group count there, and those
-- of the queue do not. Of several groups that are due, the first in `turns` is next; a group that
-- was served goes to the end. The empty name in `turns` is the queue itself: it waits for the moment
-- at which its own limit lets a message run.
--
-- `starts` has a member for each start that a rate still counts: group, NUL, the moment at which it
-- counts no more, and id.

local last_moment, last_text
local function format_moment19(moment)
  -- Mostly it is the same moment again.
  if moment ~= last_moment then
    last_moment, last_text = moment, string.format('%019.2f', math.max(0, math.min(moment, MAX_SCORE)))
  end
  return last_text
end

local function place_of(group, level, moment) return group .. '\0' .. level .. format_moment19(moment) end

local function group_of(place) return string.match(place, '^(%Z*)%z') or '' end

-- Add a group to a list, which has each of them once.
local function add_group(groups, group)
  if not groups[group] then groups[#groups + 1], groups[group] = group, true end
end

-- Return the level and the moment of a member of `lines`.
local function level_and_moment(member)
  local nul = string.find(member, '\0', 1, true) or 0
  return string.sub(member, nul + 1, nul + 1), number_or(0, string.sub(member, nul + 2, nul + 20))
end

local function id_in_line(member) return string.sub(member, (string.find(member, '\0', 1, true) or 0) + 21) end

-- Return the group that a body names, or the part of it that comes from the client: nil if none.
local function group_in(body)
  local text = string.match(body, '^[%d+ext]*g([^ \n]+)')
  if not text then return nil end
  return (string.gsub(text, '%%(%x%x)', function(digits) return string.char(tonumber(digits, 16)) end))
end

-- Return text that sorts behind a member of a group in `lines`, and behind all those of the group
-- that scripts have written.
local function behind(group, member)
  -- A foreign one may sort even further behind.
  return string.byte(member, #group + 2) == 255 and member or group .. '\0\255'
end

-- Fail if one of the keys of groups is of a foreign type: call this before the first write.
local function check_groups()
  redis.call('HGET', places, '')
  for _, set in ipairs({grouped, lines, turns, trials, starts}) do redis.call('ZSCORE', set, '') end
end

-- A limit is text such as "c5r100p1000000o": 5 running, 100 starts in a second, ordered.
local function parse_limit(text)
  if not text or text == '' then return nil end
  local limit = {ordered = string.find(text, 'o', 1, true) ~= nil}
  limit.concurrency = tonumber(string.match(text, 'c(%d+)')) or limit.ordered and 1 or nil
  limit.rate, limit.per = tonumber(string.match(text, 'r(%d+)')), tonumber(string.match(text, 'p(%d+)')) or 1000000
  if not limit.concurrency and not limit.rate then return nil end
  return limit
end

-- Return the limits of groups by their names, nil where there is none, and by their names which are
-- paused. Its own settings are in the field "group:" and its name: "z" if it is paused, then its
-- limit after a "=", if it has one of its own.
local function limits_of(groups)
  local fields, limits, are_paused = {'group_limit'}, {}, {}
  for i, group in ipairs(groups) do fields[i + 1] = 'group:' .. group end
  local found = redis.call('HMGET', settings, unpack(fields))
  -- Most groups have none of their own: then they share one table.
  local usual = parse_limit(found[1])
  for i, group in ipairs(groups) do
    local own = found[i + 1]
    local its_own = own and string.match(own, '=(.*)$')
    if its_own then limits[group] = parse_limit(its_own) else limits[group] = usual end
    if own and string.sub(own, 1, 1) == 'z' then are_paused[group] = true end
  end
  return limits, are_paused
end

-- Return how many more messages a limit lets run now, and if that is none, from which moment on it
-- may let one. `running` is the number of those that run, if the limit has a concurrency, and
-- `first_end` returns the end of the first lease.
local function room_of(limit, group, now, running, first_end)
  local room, moment = math.huge, now
  if limit.concurrency then
    room = limit.concurrency - running
    if room <= 0 then moment = math.max(moment, first_end() or now) end
  end
  if limit.rate then
    local from = '(' .. group .. '\0' .. format_moment19(now) .. '\255'
    local count = redis.call('ZLEXCOUNT', starts, from, '(' .. group .. '\1')
    room = math.min(room, limit.rate - count)
    if count >= limit.rate then
      -- After a limit was lowered, that is too early, and a claim looks again.
      local first = redis.call('ZRANGEBYLEX', starts, from, '(' .. group .. '\1', 'LIMIT', 0, 1)[1]
      local nul = string.find(first, '\0', 1, true)
      moment = math.max(moment, math.ceil(number_or(now, string.sub(first, nul + 1, nul + 19))))
    end
  end
  return room, moment
end

-- Return when the first message of a group comes due that waits: not exactly, if that has passed.
local function first_due(group, limit, now)
  local base, soonest = group .. '\0', nil
  local from = '[' .. base .. '!'
  while from do
    local member = redis.call('ZRANGEBYLEX', lines, from, '(' .. base .. ':', 'LIMIT', 0, 1)[1]
    if not member then return soonest end
    local level, due = level_and_moment(member)
    if due <= now or level == '!' and limit and limit.ordered then return due end
    soonest = math.min(soonest or due, due)
    from = level ~= '9' and '[' .. base .. string.char(string.byte(level) + 1)
  end
  return soonest
end

-- Return the first suspect of a group, or its first running message, as a member of `lines`.
local function first_behind(group)
  return redis.call('ZRANGEBYLEX', lines, '[' .. group .. '\0?', '(' .. group .. '\0\127', 'LIMIT', 0, 1)[1]
end

-- Return how many messages of a group workers have, and a function that tells when the first lease
-- ends.
local function running_of(group, now)
  local from, to = '(' .. group .. '\0~' .. format_moment19(now) .. '\255', '(' .. group .. '\0\127'
  return redis.call('ZLEXCOUNT', lines, from, to), function()
    local first = redis.call('ZRANGEBYLEX', lines, from, to, 'LIMIT', 0, 1)[1]
    if not first then return nil end
    local _, ends = level_and_moment(first)
    return ends
  end
end

-- Return when a message of a group that is not paused may be handed out that waits, and when a
-- suspect may: nil if there is none.
local function next_turns(group, limit, now, may_have_suspects)
  local due, is_ordered = first_due(group, limit, now), limit and limit.ordered
  local behind = (may_have_suspects or is_ordered) and first_behind(group)
  local trial = behind and level_and_moment(behind) == '?' and now or nil
  -- Whatever has been handed out holds an ordered group up.
  if is_ordered and behind then due = nil end
  if not limit or not (due or trial) then return due, trial end
  local running, first_end = 0, nil
  if limit.concurrency then running, first_end = running_of(group, now) end
  local _, from = room_of(limit, group, now, running, first_end)
  return due and math.max(due, from), trial and math.max(trial, from)
end

-- Give groups these turns, by their names. A group that waits for its turn already keeps its place,
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
local function settle(groups, now, has_new_suspects, served_at)
  if #groups == 0 then return end
  local may_have_suspects = has_new_suspects or redis.call('EXISTS', trials) == 1
  local limits, are_paused = limits_of(groups)
  local due_turns, trial_turns = {}, {}
  for _, group in ipairs(groups) do
    if not are_paused[group] then
      due_turns[group], trial_turns[group] = next_turns(group, limits[group], now, may_have_suspects)
    end
  end
  put_turns(turns, groups, due_turns, now, served_at)
  if may_have_suspects then put_turns(trials, groups, trial_turns, now, served_at) end
end

-- Return those groups whose turns may come sooner, after a change that cannot make them later, and
-- does not concern suspects: those that wait for their turn already keep it.
local function without_turn(groups, now)
  local found = {}
  if #groups == 0 then return found end
  for i, turn in ipairs(redis.call('ZMSCORE', turns, unpack(groups))) do
    if not turn or tonumber(turn) > now then found[#found + 1] = groups[i] end
  end
  return found
end

-- Return those groups for which a message that no longer runs may make a difference: those that
-- wait for a slot.
local function waiting_for_slots(groups, now)
  if #groups == 0 then return groups end
  local limits, limited = limits_of(groups), {}
  for _, group in ipairs(groups) do
    if limits[group] and limits[group].concurrency then limited[#limited + 1] = group end
  end
  if redis.call('EXISTS', trials) == 1 then return limited end
  return without_turn(limited, now)
end

-- Move a message to a place in its group's line. Its group has to be settled then.
local function set_place(id, place, old)
  if old then redis.call('ZREM', lines, old .. id) end
  redis.call('ZADD', lines, 0, place .. id)
  redis.call('HSET', places, id, place)
end

-- Make a message wait in the line of its group, at a level, where it was at a place, if it was.
local function line_up(id, group, level, due, old)
  redis.call('ZADD', grouped, format_score(due), id)
  set_place(id, place_of(group, level, due), old)
end

-- Take messages out of their groups' lines, if they are in any, before anything else is deleted.
-- Return the groups, to be settled then.
local function leave_lines(ids)
  local members, waiting_ids, groups = {}, {}, {}
  if #ids == 0 or redis.call('EXISTS', places) == 0 then return groups end
  for i, place in ipairs(redis.call('HMGET', places, unpack(ids))) do
    if place then
      members[#members + 1], waiting_ids[#waiting_ids + 1] = place .. ids[i], ids[i]
      add_group(groups, group_of(place))
    end
  end
  if #members > 0 then
    check_groups()
    redis.call('ZREM', lines, unpack(members))
    redis.call('ZREM', grouped, unpack(waiting_ids))
  end
  return groups
end

-- Return the level of a message that waits after it had this place, or none.
local function level_of(group, place, priority)
  local before = place and level_and_moment(place)
  local was_out = before and (before < '0' or before > '9')
  if was_out then
    local limit = limits_of({group})[group]
    if limit and limit.ordered then return '!' end
  end
  return tostring(9 - priority)
end

-- Return whether messages wait for a slot of the queue.
local function awaits_slot() return redis.call('ZSCORE', turns, '') end

-- Tell the others that the queue has a free slot.
local function free_slot(now)
  redis.call('ZREM', turns, '')
  announce(now, now)
end

-- Return the beginning of the members that count starts of a group by its rate.
local function start_of(group, limit, now) return group .. '\0' .. format_moment19(now + limit.per) end

local function counting_no_more(members, now)
  local over = {}
  for _, member in ipairs(members) do
    local nul = string.find(member, '\0', 1, true) or 0
    if number_or(0, string.sub(member, nul + 1, nul + 19)) <= now then over[#over + 1] = member end
  end
  return over
end

-- Count messages of these groups as started, by rates of which `longest` is the longest period.
local function log_starts(starting, groups, longest, now)
  local old, added = {}, {}
  -- Starts that count no more make room. If there are any among a few that chance picks, those of
  -- these groups do; and if most of them are, so do many more that chance picks, because other
  -- groups may never come again.
  local few = 3 + math.floor(#starting / 16)
  local share = #counting_no_more(redis.call('ZRANDMEMBER', starts, -few), now) / few
  for _, group in ipairs(share > 0 and groups or {}) do
    local base = group .. '\0'
    local from, to = '[' .. base, '(' .. base .. format_moment19(now) .. '\255'
    local its_old = redis.call('ZRANGEBYLEX', starts, from, to, 'LIMIT', 0, 2 * #starting + 10)
    for _, member in ipairs(its_old) do old[#old + 1] = member end
    if #old > 2 * #starting then break end
  end
  if share > 0.5 then
    for _, member in ipairs(counting_no_more(redis.call('ZRANDMEMBER', starts, -2 * #starting), now)) do old[#old + 1] = member end
  end
  if #old > 0 then redis.call('ZREM', starts, unpack(old)) end
  for i, member in ipairs(starting) do added[2 * i - 1], added[2 * i] = 0, member end
  redis.call('ZADD', starts, unpack(added))
  local keep_ms = math.ceil(longest / 1000)
  if redis.call('PTTL', starts) < keep_ms then redis.call('PEXPIRE', starts, keep_ms) end
end
