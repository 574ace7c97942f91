-- groups: the groups of messages, and their limits. Needs clock and leases, and the key settings.
-- See docs/redis-data-model.md; group_turns.lua has the functions that change their turns.
--
-- The position of a message of a group is the group, a NUL, a level, and a moment of 19 characters.
-- Each member of `group_members` is a position and the id, so they sort by group, then by level, then
-- by moment. The levels in order:
--   !  waits, and holds its group up: the group is ordered, and the message was handed out before
--   0 to 9  waits; 9 less its priority. These moments are the due times
--   ?  waits as a suspect, since the end of its lease
--   ~  a worker has it, until the end of its lease; or it is a suspect that no claim has found yet
-- A group that has settings of its own also has a member that ends after the NUL with a DEL.
-- So one call tells the next message of a group, the number of its running ones, or the end of their
-- first lease, and a lease that ends frees its slot by itself.
--
-- `group_turns` and `suspect_turns` have the groups of which a message may be handed out some time,
-- scored by that moment: a message that waits, and a suspect. They respect the limits of the group,
-- but not those of the queue. Of several groups that are due, the first in `group_turns` is next; a
-- group that was served goes to the end. The empty name in `group_turns` is the queue itself: it
-- waits for the moment at which its own limit lets a message run.
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

local function position_of(group, level, moment) return group .. '\0' .. level .. format_moment19(moment) end

local function group_of(position) return string.match(position, '^(%Z*)%z') or '' end

-- Add a group to a list, which has each of them once.
local function add_group(groups, group)
  if not groups[group] then groups[#groups + 1], groups[group] = group, true end
end

-- Return the level and the moment of a member of `group_members`.
local function level_and_moment(member)
  local nul = string.find(member, '\0', 1, true) or 0
  return string.sub(member, nul + 1, nul + 1), number_or(0, string.sub(member, nul + 2, nul + 20))
end

local function id_in_member(member) return string.sub(member, (string.find(member, '\0', 1, true) or 0) + 21) end

-- Return the group that a body names, or the part of it that comes from the client: nil if none.
local function group_in(body)
  local text = string.match(body, '^[%d+extfb]*g([^ \n]+)')
  if not text then return nil end
  return (string.gsub(text, '%%(%x%x)', function(digits) return string.char(tonumber(digits, 16)) end))
end

-- Return text that sorts in `group_members` behind this member of a group, and behind all those of
-- the group that scripts have written.
local function after_group(group, member)
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
  local stored = redis.call('HMGET', settings, unpack(fields))
  -- Most groups have none of their own: then they share one table.
  local usual = parse_limit(stored[1])
  for i, group in ipairs(groups) do
    local own = stored[i + 1]
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

-- Return how far a group has used its rate: {count, last, total, expired, first}. count: the starts
-- that count, which may be too many if as many as are wanted may start anyway. last: the moment of the
-- last start. total: the number of all up to it. expired: how many of them count no more. first: the
-- moment of the first one that counts, if this had to find it.
local function read_usage(limit, group, now, wanted)
  -- Whatever does not begin with a digit is foreign.
  local to, moment_at = '(' .. group .. '\0:', #group + 2
  local usage = {count = 0, last = 0, total = 0, expired = 0, first = false}
  local last = redis.call('ZREVRANGEBYLEX', rate_log, to, '[' .. group .. '\0', 'LIMIT', 0, 1)[1]
  if not last then return usage end
  local moment, total, expired = string.match(last, '^(%S+) %S+ %d+ (%d+) (%d+)', moment_at)
  usage.last, usage.total, usage.expired = number_or(0, moment), tonumber(total) or 0, tonumber(expired) or 0
  if usage.last + limit.per <= now then
    usage.expired = usage.total
  elseif usage.total - usage.expired + wanted > limit.rate then
    local from = '(' .. group .. '\0' .. format_moment19(now - limit.per) .. '\255'
    local first = redis.call('ZRANGEBYLEX', rate_log, from, to, 'LIMIT', 0, 1)[1]
    local first_moment, before = string.match(first or last, '^(%S+) %S+ (%d+)', moment_at)
    usage.first, usage.expired = number_or(now, first_moment), tonumber(before) or 0
  end
  usage.count = math.max(0, usage.total - usage.expired)
  return usage
end

-- Return which of these members of `rate_log` count no more.
local function expired_starts(members, now)
  local expired = {}
  for _, member in ipairs(members) do
    -- Foreign ones have no period, and never counted.
    local moment, period = string.match(member, '%z([%d.]+) (%S+)')
    if number_or(0, moment) + number_or(0, period) <= now then expired[#expired + 1] = member end
  end
  return expired
end

-- Return how many more messages of a group a limit lets run now: exactly if that is less than are
-- wanted, and otherwise a number that is large enough. Also return what `read_usage` returns, if the
-- limit has a rate. `running` returns how many are running.
local function capacity_of(limit, group, now, wanted, running)
  local capacity, usage = math.huge, nil
  if limit.concurrency then capacity = limit.concurrency - running(group, now) end
  if limit.rate and capacity > 0 then
    usage = read_usage(limit, group, now, math.min(wanted, capacity))
    capacity = math.min(capacity, limit.rate - usage.count)
  end
  return capacity, usage
end

-- Return from which moment on a limit may let one more message of a group run. `running` returns how
-- many run, and `first_end` when the first lease of these ends.
local function free_from(limit, group, now, running, first_end)
  local moment = now
  if limit.concurrency and running(group, now) >= limit.concurrency then
    moment = math.max(moment, first_end(group, now) or now)
  end
  if limit.rate then
    local usage = read_usage(limit, group, now, 1)
    -- After the limit was lowered, that is too early, and a claim finds out.
    if usage.count >= limit.rate then moment = math.max(moment, math.ceil((usage.first or now) + limit.per)) end
  end
  return moment
end

-- Return the first suspect of a group, or its first running message, as a member of `group_members`.
local function first_suspect_or_running(group)
  return redis.call('ZRANGEBYLEX', group_members, '[' .. group .. '\0?', '(' .. group .. '\0\127', 'LIMIT', 0, 1)[1]
end

-- Return whether messages wait for a slot of the queue.
local function awaits_slot() return redis.call('ZSCORE', group_turns, '') end

-- Tell the others that the queue has a free slot.
local function free_slot(now)
  redis.call('ZREM', group_turns, '')
  announce(now, now)
end

-- Return the groups whose turns may come sooner, after a change that cannot make them later, and
-- does not concern suspects. Groups that are due already keep their turn.
local function without_turn(groups, now)
  local turnless = {}
  if #groups == 0 then return turnless end
  for i, turn in ipairs(redis.call('ZMSCORE', group_turns, unpack(groups))) do
    if not turn or tonumber(turn) > now then turnless[#turnless + 1] = groups[i] end
  end
  return turnless
end

-- Return the groups that may wait for a slot, and whose turn may come sooner if one of their messages
-- no longer runs.
local function waiting_for_slots(groups, now, some_suspects)
  if #groups == 0 then return groups end
  local limits, limited = limits_of(groups), {}
  for _, group in ipairs(groups) do
    if limits[group] and limits[group].concurrency then limited[#limited + 1] = group end
  end
  if some_suspects then return limited end
  return without_turn(limited, now)
end
