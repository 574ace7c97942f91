-- groups: the groups of messages, and their limits. Needs clock and leases, and the key settings.
-- See docs/redis-data-model.md; settle.lua has the functions that change their turns.
--
-- The place of a message of a group is the group, a NUL, a level, and a moment of 19 characters.
-- Places sort by group, then by level, then by moment, in `group_members`, where the id follows each. The
-- levels in order:
--   !  waits, and holds its group up: the group is ordered, and the message was handed out before
--   0 to 9  waits; 9 less its priority. These moments are the due times
--   ?  waits as a suspect, since the end of its lease
--   ~  a worker has it, until the end of its lease; or it is a suspect that no claim has found yet
-- A group that has settings of its own also has a member that ends after the NUL with a DEL.
-- So the next message of a group, the number of its running ones and the end of their first lease
-- are each one look, and a lease that ends frees its slot by itself.
--
-- `group_turns` and `suspect_turns` have the groups of which a message may be handed out some time, scored by
-- that moment: a message that waits, and a suspect. The limits of the group count there, and those
-- of the queue do not. Of several groups that are due, the first in `group_turns` is next; a group that
-- was served goes to the end. The empty name in `group_turns` is the queue itself: it waits for the moment
-- at which its own limit lets a message run.
--
-- `rate_log` has a member for each claim that started messages which a rate counts: group, NUL, the
-- moment in 19 characters, the period of the rate, the number of all starts of the group before and
-- after, and how many of those before count no more, as far as the claim knew. Each number follows a
-- space. So the last member and the first one that still counts tell how many starts count. The
-- empty group is the queue itself here, too.

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

-- Return the level and the moment of a member of `group_members`.
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

-- Return text that sorts behind a member of a group in `group_members`, and behind all those of the group
-- that scripts have written.
local function behind(group, member)
  -- A foreign one may sort even further behind.
  return string.byte(member, #group + 2) == 255 and member or group .. '\0\255'
end

-- Fail if one of the keys of groups is of a foreign type: call this before the first write.
local function check_groups()
  redis.call('HGET', positions, '')
  for _, set in ipairs({group_waiting, group_members, group_turns, suspect_turns, rate_log}) do redis.call('ZSCORE', set, '') end
end

-- A limit is text such as "c5r100p1000000o": 5 running, 100 starts in a second, ordered.
local function parse_limit(text)
  local c, running, r, rate, per, o = string.match(text or '', '^(c?)(%d*)(r?)(%d*)p?(%d*)(o?)$')
  local concurrency = c == 'c' and tonumber(running) or o == 'o' and 1 or nil
  rate = r == 'r' and tonumber(rate) or nil
  if not concurrency and not rate then return nil end
  return {concurrency = concurrency, rate = rate, per = tonumber(per) or 1000000, ordered = o == 'o'}
end

-- Return two tables with the names of groups as keys: the limit of each, nil if it has none, and
-- which are paused. A group's own settings are in the field "group:" and its name: "z" if it is
-- paused, then "=" and its limit, if it has one of its own.
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

-- Return how many messages of a group workers have.
local function running_of(group, now)
  return redis.call('ZLEXCOUNT', group_members, '(' .. group .. '\0~' .. format_moment19(now) .. '\255', '(' .. group .. '\0\127')
end

-- Return when the first lease of these ends.
local function first_end_of(group, now)
  local from = '(' .. group .. '\0~' .. format_moment19(now) .. '\255'
  local first = redis.call('ZRANGEBYLEX', group_members, from, '(' .. group .. '\0\127', 'LIMIT', 0, 1)[1]
  if not first then return nil end
  local _, ends = level_and_moment(first)
  return ends
end

-- Return what a rate counts of a group: {count, last, after, over, first}: the starts that count,
-- which may be too many if as many as are wanted may start anyway; the last moment of one, the
-- number of all up to it, and of those that count no more; the first moment of one that counts, if
-- this had to find it.
local function read_starts(limit, group, now, wanted)
  -- Whatever does not begin with a digit is foreign.
  local to, moment_at = '(' .. group .. '\0:', #group + 2
  local found = {count = 0, last = 0, after = 0, over = 0, first = false}
  local last = redis.call('ZREVRANGEBYLEX', rate_log, to, '[' .. group .. '\0', 'LIMIT', 0, 1)[1]
  if not last then return found end
  local moment, after, over = string.match(last, '^(%S+) %S+ %d+ (%d+) (%d+)', moment_at)
  found.last, found.after, found.over = number_or(0, moment), tonumber(after) or 0, tonumber(over) or 0
  if found.last + limit.per <= now then
    found.over = found.after
  elseif found.after - found.over + wanted > limit.rate then
    local from = '(' .. group .. '\0' .. format_moment19(now - limit.per) .. '\255'
    local first = redis.call('ZRANGEBYLEX', rate_log, from, to, 'LIMIT', 0, 1)[1]
    local first_moment, before = string.match(first or last, '^(%S+) %S+ (%d+)', moment_at)
    found.first, found.over = number_or(now, first_moment), tonumber(before) or 0
  end
  found.count = math.max(0, found.after - found.over)
  return found
end

-- Return those of these members of `rate_log` that count no more.
local function starts_over(members, now)
  local over = {}
  for _, member in ipairs(members) do
    -- Foreign ones have no period, and never counted.
    local moment, period = string.match(member, '%z([%d.]+) (%S+)')
    if number_or(0, moment) + number_or(0, period) <= now then over[#over + 1] = member end
  end
  return over
end

-- Return how many more messages of a group a limit lets run now: exactly if that is less than are
-- wanted, and otherwise a number that is large enough. Also return what `read_starts` returns, if the
-- limit has a rate. `running` returns how many are running.
local function room_of(limit, group, now, wanted, running)
  local room, counted = math.huge, nil
  if limit.concurrency then room = limit.concurrency - running(group, now) end
  if limit.rate and room > 0 then
    counted = read_starts(limit, group, now, math.min(wanted, room))
    room = math.min(room, limit.rate - counted.count)
  end
  return room, counted
end

-- Return from which moment on a limit may let one more message of a group run. `running` returns how
-- many run, and `first_end` when the first lease of these ends.
local function free_from(limit, group, now, running, first_end)
  local moment = now
  if limit.concurrency and running(group, now) >= limit.concurrency then
    moment = math.max(moment, first_end(group, now) or now)
  end
  if limit.rate then
    local counted = read_starts(limit, group, now, 1)
    -- After the limit was lowered, that is too early, and a claim looks again.
    if counted.count >= limit.rate then moment = math.max(moment, math.ceil((counted.first or now) + limit.per)) end
  end
  return moment
end

-- Return the first suspect of a group, or its first running message, as a member of `group_members`.
local function first_behind(group)
  return redis.call('ZRANGEBYLEX', group_members, '[' .. group .. '\0?', '(' .. group .. '\0\127', 'LIMIT', 0, 1)[1]
end

-- Return whether messages wait for a slot of the queue.
local function awaits_slot() return redis.call('ZSCORE', group_turns, '') end

-- Tell the others that the queue has a free slot.
local function free_slot(now)
  redis.call('ZREM', group_turns, '')
  announce(now, now)
end

-- Return those groups whose turns may come sooner, after a change that cannot make them later, and
-- does not concern suspects: those that wait for their turn already keep it.
local function without_turn(groups, now)
  local found = {}
  if #groups == 0 then return found end
  for i, turn in ipairs(redis.call('ZMSCORE', group_turns, unpack(groups))) do
    if not turn or tonumber(turn) > now then found[#found + 1] = groups[i] end
  end
  return found
end

-- Return those groups for which a message that no longer runs may make a difference: those that
-- wait for a slot. There may be suspects, or not.
local function waiting_for_slots(groups, now, some_trials)
  if #groups == 0 then return groups end
  local limits, limited = limits_of(groups), {}
  for _, group in ipairs(groups) do
    if limits[group] and limits[group].concurrency then limited[#limited + 1] = group end
  end
  if some_trials then return limited end
  return without_turn(limited, now)
end
