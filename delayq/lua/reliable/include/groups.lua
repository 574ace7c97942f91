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

local function format_moment19(moment)
  return string.format('%019.2f', math.max(0, math.min(moment, MAX_SCORE)))
end

local function place_of(group, level, moment) return group .. '\0' .. level .. format_moment19(moment) end

local function group_of(place) return string.match(place, '^(%Z*)%z') or '' end

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

-- Return the limit of a group, nil if it has none, and whether it is paused.
local function limit_of(group)
  local limits, are_paused = limits_of({group})
  return limits[group], are_paused[group]
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

-- Return when a message of the group may be handed out that waits, and when a suspect may: nil if
-- there is none, or the group is paused.
local function next_turns(group, now)
  local limit, is_paused = limit_of(group)
  if is_paused then return nil, nil end
  local due, behind = first_due(group, limit, now), first_behind(group)
  local level = behind and level_and_moment(behind)
  local trial = level == '?' and now or nil
  -- Whatever has been handed out holds an ordered group up.
  if limit and limit.ordered and behind then due = nil end
  if not limit or not (due or trial) then return due, trial end
  local running, first_end = 0, nil
  if behind and limit.concurrency then running, first_end = running_of(group, now) end
  local _, from = room_of(limit, group, now, running, first_end)
  return due and math.max(due, from), trial and math.max(trial, from)
end

local function put_turn(set, group, moment, now, served_at)
  local old = tonumber(redis.call('ZSCORE', set, group) or nil)
  if not moment then
    if old then redis.call('ZREM', set, group) end
  elseif served_at or not old or old > now or moment > now then
    moment = math.max(moment, served_at or now)
    if moment == old then return end
    redis.call('ZADD', set, format_score(moment), group)
    -- Tell the others only if they would wake too late otherwise.
    local is_sooner = not served_at and (not old or moment < old)
    if is_sooner and redis.call('ZRANGE', set, 0, 0)[1] == group then announce(moment, now) end
  end
end

-- Give a group its turn anew, after something has changed. A group that waits for its turn already
-- keeps its place, unless it was served: then it goes behind those that were served before.
local function settle(group, now, served_at)
  local turn, trial = next_turns(group, now)
  put_turn(turns, group, turn, now, served_at)
  if trial or redis.call('EXISTS', trials) == 1 then put_turn(trials, group, trial, now, served_at) end
end

local function settle_all(groups, now)
  for group in pairs(groups) do settle(group, now) end
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
-- Return the groups, as keys, to be settled then.
local function leave_lines(ids)
  local members, waiting_ids, groups = {}, {}, {}
  if #ids == 0 or redis.call('EXISTS', places) == 0 then return groups end
  for i, place in ipairs(redis.call('HMGET', places, unpack(ids))) do
    if place then
      members[#members + 1], waiting_ids[#waiting_ids + 1] = place .. ids[i], ids[i]
      groups[group_of(place)] = true
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
    local limit = limit_of(group)
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

-- Count messages as started, by a rate.
local function log_starts(group, limit, ids, now)
  local ends, added = format_moment19(now + limit.per), {}
  -- Starts that count no more make room: those of this group, and some that chance picks, because
  -- other groups may never come again.
  local base = group .. '\0'
  local old = redis.call('ZRANGEBYLEX', starts, '[' .. base, '(' .. base .. format_moment19(now) .. '\255', 'LIMIT', 0, 2 * #ids + 10)
  for _, member in ipairs(redis.call('ZRANDMEMBER', starts, 2 * #ids)) do
    local nul = string.find(member, '\0', 1, true) or 0
    if number_or(0, string.sub(member, nul + 1, nul + 19)) <= now then old[#old + 1] = member end
  end
  if #old > 0 then redis.call('ZREM', starts, unpack(old)) end
  for i, id in ipairs(ids) do added[2 * i - 1], added[2 * i] = 0, base .. ends .. id end
  redis.call('ZADD', starts, unpack(added))
  local keep_ms = math.ceil(limit.per / 1000)
  if redis.call('PTTL', starts) < keep_ms then redis.call('PEXPIRE', starts, keep_ms) end
end
