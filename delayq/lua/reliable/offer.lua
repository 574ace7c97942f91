-- offer: store messages, each due after a delay of its own or at a moment.
--
-- Keys:
--   messages        see include/queue.lua
--   wake            CHANNEL  where a new head is announced: its due time, microseconds
--   remembered      ZSET     ids that count as taken, scored by the end of that time, microseconds
--   moments         see include/moments.lua
--   settings        HASH     see include/settings.lua
--   call            STRING   see include/call.lua
-- Arguments:
--   number           int   of this call: the same as that of the last one if its reply was lost
--   partitions       int   the number of partitions by which the caller has placed the messages
--   id...            text  of each message
--   priority...      int   0 to 9
--   when...          text  microseconds from now; or "@" and the moment, microseconds
--   ttl_us...        int   time to live, microseconds; 0: no end
--   unique_us...     int   for this long, the id counts as taken whatever becomes of the message,
--                          microseconds; 0: as long as the message lives
--   on_duplicate...  text  "ignore", "replace" or "raise"
--   content...       text  the limits of its own and its group, or nothing; a space and headers,
--                          or nothing; newline, followers, payload
-- Roles: producer
-- Repeatable: yes
-- Stores: yes
--
-- Returns for each message: 1 stored, 2 stored instead of an earlier one, 0 ignored, -1 there
-- is one already, -2 full, -5 it would expire before its moment. And behind these -3, if the user may
-- not announce a new head. An error, DELAYQ_SETTINGS, if the queue has another number of partitions.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue
-- include: moments
-- include: settings
-- include: call

local first_reply = earlier_reply()
if first_reply then return first_reply end
local layout, stored_number, max_size = unpack(redis.call('HMGET', settings, 'layout', 'partitions', 'max_size'))
if not agrees_on(partitions, layout, stored_number) then return settings_changed() end
max_size = number_or(0, max_size)

-- Return which of these ids are in use, by id, and whether any is.
local function ids_in_use(ids)
  local used, is_any = {}, false
  for i, body in ipairs(redis.call('HMGET', bodies, unpack(ids))) do
    if body then used[ids[i]], is_any = true, true end
  end
  return used, is_any
end

local now = now_us()
-- The writes, collected: one command for all costs a third of one for each. By priority: scores,
-- and the first due time.
local new_bodies, new_scores, earliest, new_priorities, new_expiries, new_ends = {}, {}, {}, {}, {}, {}
-- Of those in groups: the scores, members and positions, and the groups.
local grouped_scores, new_members, new_positions, groups = {}, {}, {}, {}
local function write()
  -- Whatever may be refused comes before the first write.
  local groups_without_turn = without_turn(groups, now)
  for priority, due in pairs(earliest) do
    -- Tell the others only if they would wake too late otherwise.
    local first = redis.call('ZRANGE', waiting[priority], 0, 0, 'WITHSCORES')[2]
    if not first or due < tonumber(first) then announce(due, now) end
  end
  -- Next the keys that may be of a foreign type: the type of the bodies is known.
  for priority, scores in pairs(new_scores) do redis.call('ZADD', waiting[priority], unpack(scores)) end
  if #new_bodies > 0 then redis.call('HSET', bodies, unpack(new_bodies)) end
  if #new_priorities > 0 then redis.call('HSET', priorities, unpack(new_priorities)) end
  if #new_expiries > 0 then
    redis.call('HSET', expiries, unpack(new_expiries))
    redis.call('ZADD', expiry_index, unpack(new_ends))
  end
  if #new_positions > 0 then
    redis.call('ZADD', group_waiting, unpack(grouped_scores))
    redis.call('ZADD', group_members, unpack(new_members))
    redis.call('HSET', positions, unpack(new_positions))
    update_turns(groups_without_turn, now)
  end
  grouped_scores, new_members, new_positions, groups = {}, {}, {}, {}
  write_moments(now)
end

local ids, some_grouped, some_moments, some_rank, some_expire = {}, false, false, false, false
for at = FIRST, #ARGV, STRIDE do
  local moment = moment_in(ARGV[at + WHEN])
  local delay = moment or tonumber(ARGV[at + WHEN])
  if not delay or delay < 0 or delay > 9007199254740992000 then
    return redis.error_reply('DELAYQ_DELAY delay out of range')
  end
  some_moments = some_moments or moment ~= nil
  some_rank, some_expire = some_rank or ARGV[at + PRIORITY] ~= '0', some_expire or ARGV[at + TTL_US] ~= '0'
  ids[#ids + 1] = ARGV[at + ID]
  some_grouped = some_grouped or group_in(ARGV[at + CONTENT]) ~= nil
end
local remembers = redis.call('EXISTS', remembered) == 1
-- A key of a foreign type must fail before the first write.
if some_grouped then check_groups() end
if remembers then redis.call('ZSCORE', remembered, '') end
if some_moments then redis.call('ZSCORE', shared_moments, '') end
if some_rank then redis.call('HGET', priorities, '') end
if some_expire then
  redis.call('HGET', expiries, '')
  redis.call('ZSCORE', expiry_index, '')
end
local size = max_size > 0 and redis.call('HLEN', bodies) or 0
if max_size > 0 and size + COUNT > max_size then size = size - count_expired(now) end
local in_use, is_any_in_use = ids_in_use(ids)
if is_any_in_use then
  check_messages()
  demand_removal()
end
for id in pairs(in_use) do
  local message = find_message(id, now)
  -- An expired message counts as absent, although no claim has dropped it yet, and so does one of
  -- which a part is missing.
  if message and message.expired then free_id(id, message, now) end
  if not message or message.expired then in_use[id] = nil end
end
-- The messages of a call are a quarter of a microsecond apart, so that they keep their order. Those
-- without a delay begin so long before now that the last of them is not due later than now.
local quarters, whole, whole_of = {[0] = '0', '1', '2', '3'}, nil, nil
local earlier = now - math.ceil(COUNT / 4)

local reply, index, unique = {}, 0, {}
for at = FIRST, #ARGV, STRIDE do
  local id, priority, on_duplicate = ARGV[at + ID], tonumber(ARGV[at + PRIORITY]), ARGV[at + ON_DUPLICATE]
  local status, content = 1, ARGV[at + CONTENT]
  local moment_asked, moment_text = moment_in(ARGV[at + WHEN])
  local ttl = tonumber(ARGV[at + TTL_US])
  if moment_asked and ttl > 0 and moment_asked >= now + ttl then
    status = -5
  elseif in_use[id] then
    status = on_duplicate == 'ignore' and 0 or -1
    if on_duplicate == 'replace' then
      write()
      new_bodies, new_scores, earliest, new_priorities, new_expiries, new_ends = {}, {}, {}, {}, {}, {}
      local message = find_message(id, now)
      if not message.leased then
        content = with_batch(content, redis.call('HGET', bodies, id))
        delete_message(id, message.where)
        size = size - 1
        status = 2
      end
    end
  elseif remembers and on_duplicate ~= 'replace' and number_or(0, redis.call('ZSCORE', remembered, id)) > now then
    status = on_duplicate == 'ignore' and 0 or -1
  end
  if status == 1 and max_size > 0 and size >= max_size then status = -2 end
  if status > 0 then
    local group = some_grouped and group_in(ARGV[at + CONTENT])
    local set, due, times = waiting[priority], nil, nil
    if group then set = group_waiting end
    if moment_asked then due = due_at(moment_asked, moment_text, set, earlier) end
    if due then
      times = times_at(moment_asked, due, now)
    else
      local delay = moment_asked and 0 or tonumber(ARGV[at + WHEN])
      local moment, quarter = delay > 0 and now or earlier, index % 4
      local base = moment + (index - quarter) / 4
      if base ~= whole_of then whole, whole_of = string.format('%.0f', base), base end
      due, times = moment + index / 4 + delay, whole .. quarters[quarter] .. (delay > 0 and '+' .. ARGV[at + WHEN] or '')
    end
    size = size + 1
    in_use[id] = true
    local used = #new_bodies
    new_bodies[used + 1], new_bodies[used + 2] = id, times .. content
    if group then
      local position = position_of(group, tostring(9 - priority), due)
      add_group(groups, group)
      used = #new_positions
      grouped_scores[used + 1], grouped_scores[used + 2] = due, id
      new_members[used + 1], new_members[used + 2] = 0, position .. id
      new_positions[used + 1], new_positions[used + 2] = id, position
    else
      local scores = new_scores[priority]
      if not scores then
        scores = {}
        new_scores[priority] = scores
      end
      used = #scores
      scores[used + 1], scores[used + 2] = due, id
      if not earliest[priority] or due < earliest[priority] then earliest[priority] = due end
    end
    if priority > 0 then
      used = #new_priorities
      new_priorities[used + 1], new_priorities[used + 2] = id, priority
    end
    if ttl > 0 then
      used = #new_expiries
      new_expiries[used + 1], new_expiries[used + 2] = id, format_score(now + ttl)
      new_ends[used + 1], new_ends[used + 2] = new_expiries[used + 2], id
    end
    local unique_us = tonumber(ARGV[at + UNIQUE_US])
    if unique_us > 0 then unique[#unique + 1] = {id, now + unique_us} end
  end
  index = index + 1
  reply[index] = status
end
write()
-- Last, because a full server refuses a script only before its first write.
for _, each in ipairs(unique) do remember({each[1]}, each[2], now) end
if remembers then trim_remembered(now) end
if some_moments then trim_moments(now) end
if not may_announce then reply[#reply + 1] = -3 end
keep_reply(reply)
return reply
