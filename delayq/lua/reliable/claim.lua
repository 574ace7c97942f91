-- claim: hand due messages to a worker, under a lease.
--
-- Keys:
--   messages  see include/queue.lua
--   paused         STRING   exists while no client may take anything
--   dead           ZSET     names of dead letters, scored by their time of death, microseconds
--   dead_messages  HASH     name to the reason, as JSON, newline, body: see include/letters.lua
--   wake           CHANNEL  where other clients are told that they need not look
--   settings       HASH     see include/settings.lua; and CHANNEL of that name, where the end of
--                           messages is announced: "finished", and the id
--   call           STRING   number of this client's last claim, and the token of its leases
-- Arguments:
--   epoch         text    of the settings that the caller knows
--   number        int     of this claim, higher than that of the client's last one
--   limit         int     hand out at most this many
--   lease_us      int     how long the worker has them
--   max_attempts  int     a message that has used this many dies instead, unless its body has a
--                         limit of its own; 0: no limit
--   signature     text    of the caller. If all due messages were handed out, it is published
--                         behind the due time of the next one, and now; empty: it is not
--   suspects      0 or 1  whether the client may have a suspect: not if it has one at work, or asks
--                         for one elsewhere
--   held_id       text    the suspect of this queue that the client has at work: if its lease is
--                         over, it may have another; or empty
--   held_token    text    of that lease
--   company       0 or 1  whether the client has other messages of this queue at hand
-- Roles: consumer
-- Repeatable: no
-- Undone by: release_call
--
-- Returns {now_us, wait_us, expired, died, listeners, token, {id, ...}, {body, ...}, {position,
-- priority, attempt, forgiven, due, ...}, suspect, more, {id, ...}}. wait_us: the time until the
-- next message is due or the next lease ends, suspects apart; 0 if one already is, or groups still
-- wait for turns by limits that have changed; -1 if there is none, the queue is paused, or the claim
-- was given up. listeners: the number of clients that got
-- the notice; 0 if there was none, -1 if the user may not publish it. token: of all these leases,
-- which is their end. position: of a message that has another priority than 0, or was handed out
-- before; due: empty if the body tells it. suspect: 1 if the message handed out is one, and thus
-- alone. more: 1 if suspects wait that were not handed out. The last ids are of recurring messages
-- that were dropped or died. An error, DELAYQ_SETTINGS, if other settings are stored.
-- include: clock
-- include: notice
-- include: leases
-- include: queue
-- include: letters
-- include: settings

local last_number = number_or(0, string.match(redis.call('GET', call) or '', '^%d+'))
local layout, stored_epoch, queue_limit, settled_to =
  unpack(redis.call('HMGET', settings, 'layout', 'epoch', 'share', 'settled_to'))
if not knows_settings(layout, stored_epoch, epoch) then return settings_changed() end
local now = now_us()
local function nothing() return {now, -1, 0, 0, 0, '', {}, {}, {}, 0, 0, {}} end
if last_number >= tonumber(number) then return nothing() end
limit, max_attempts = tonumber(limit), tonumber(max_attempts)
-- The bodies of one answer have to cross a network before the first message can be handled, so
-- those after the first are bounded.
local bytes_left = 262144
-- Messages that are gone make room for more, but not without end.
local looks_left = limit + 400

-- Most queues have only messages that were never tried, of one priority and without an expiry: then
-- there is nothing to look up.
local highest, some_tried, some_expire, some_kept, some_grouped = 0, false, false, false, false
local used_keys = redis.call('EXISTS', paused, attempts, expiries, tokens, places, unpack(waiting))
if used_keys > 0 then some_grouped = redis.call('EXISTS', places) == 1 end
if used_keys > (some_grouped and 1 or 0) then
  if redis.call('EXISTS', paused) == 1 then return nothing() end
  highest = redis.call('EXISTS', unpack(waiting)) > 0 and 9 or 0
  some_tried = redis.call('EXISTS', attempts) == 1
  some_expire = redis.call('EXISTS', expiries) == 1
  some_kept = redis.call('EXISTS', tokens) == 1
end

-- The changes are collected: a script is refused before its first write, or does its work.
local count, ids, found_bodies, details = 0, {}, {}, {}
local passed, gone, deaths, occurrences = {}, {}, {}, {}
local expired_count, died_count, is_full = 0, 0, false

-- Return the settings about messages that are gone: expired, keep_dead, max_dead, keep. Most claims
-- find none.
local read_fates
local function fates()
  read_fates = read_fates or redis.call('HMGET', settings, 'expired', 'keep_dead', 'max_dead', 'keep')
  return unpack(read_fates)
end

local new = {used = 0, forgiven = 0}
local function hand_out(id, priority, record, body)
  if count > 0 then bytes_left = bytes_left - #body end
  count = count + 1
  ids[count], found_bodies[count] = id, body
  if record ~= new or priority > 0 then
    local due = record.due and format_score(record.due) or ''
    for _, detail in ipairs({count, priority, record.used + 1, record.forgiven, due}) do details[#details + 1] = detail end
  end
end

-- Note that a message is gone, if it is: half of it is missing, it has expired, or all its attempts
-- are used.
local function is_gone(id, priority, record, body, expiry)
  local reason, most = nil, max_attempts
  -- A message may have a limit of its own.
  if body and record.used > 0 then most = tonumber(string.match(body, '^[%d+e]+x(%d+)')) or most end
  if body and number_or(MAX_SCORE, expiry) < now then
    expired_count, reason = expired_count + 1, fates() == 'dead' and 'expired'
  elseif body and most > 0 and record.used - record.forgiven >= most then
    died_count, reason = died_count + 1, 'attempts'
  elseif body then
    return false
  end
  gone[#gone + 1] = id
  if string.find(id, '@%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d$') then occurrences[#occurrences + 1] = id end
  if reason then
    local why = {reason = reason, attempt = record.used, priority = priority, error = redis.call('HGET', errors, id) or nil}
    deaths[#deaths + 1] = {id, cjson.encode(why), body}
  end
  return true
end

-- Return the suspect without a group to hand out next: the one whose lease was lost first. If
-- priorities are in use, it has the highest among the first hundred.
local function find_suspect()
  local most, found = redis.call('EXISTS', priorities) == 1 and 100 or 10, nil
  local ids_and_ends = redis.call('ZRANGEBYSCORE', leased, '-inf', now, 'WITHSCORES', 'LIMIT', 0, most)
  for i = 1, #ids_and_ends, 2 do
    local id, priority = ids_and_ends[i], priority_of(ids_and_ends[i])
    -- One of a group waits until it is in the line of its group, whose limits count.
    local is_in_group = some_grouped and redis.call('HEXISTS', places, id) == 1
    if bytes_left > 0 and not is_in_group and (not found or priority > found.priority) then
      local body, record = redis.call('HGET', bodies, id), parse_record(redis.call('HGET', attempts, id))
      lose(record, tonumber(ids_and_ends[i + 1]))
      if is_gone(id, priority, record, body, redis.call('HGET', expiries, id)) then
        bytes_left = bytes_left - #(body or '')
      else
        found = {id = id, priority = priority, record = record, body = body}
      end
    end
  end
  return found
end

-- Return the bytes of these bodies but for the first one; nil if one is missing.
local function size_of(some_bodies)
  local size = 0
  for i = 1, #some_bodies do
    local body = some_bodies[i]
    if not body then return nil end
    size = size + #body
  end
  return size - #some_bodies[1]
end

-- Look at the due messages of one priority, in order.
local none = {}
local function take_from(priority)
  local set, offset, wanted_before, is_last = waiting[priority], passed[priority] or 0, nil, false
  while count < limit and looks_left > 0 and not is_full and not is_last do
    -- If some were gone, more may be: then look at more than are wanted.
    local wanted = limit - count
    local most = math.min(wanted_before == wanted and 200 or wanted, looks_left)
    local due_ids = redis.call('ZRANGEBYSCORE', set, '-inf', now, 'LIMIT', offset, most)
    wanted_before, is_last = wanted, #due_ids < most
    if #due_ids == 0 then return end
    if #due_ids > 1 then
      -- If bodies are large, do not read those that would not leave anyway.
      local fitting = math.max(1, math.floor(bytes_left / math.max(1, redis.call('HSTRLEN', bodies, due_ids[1]))))
      if #due_ids > fitting then due_ids, is_last = {unpack(due_ids, 1, fitting)}, false end
    end
    local due_bodies = redis.call('HMGET', bodies, unpack(due_ids))
    local is_first = count == 0 and offset == 0 and priority == 0
    local size = is_first and not some_tried and not some_expire and size_of(due_bodies)
    if size and size <= bytes_left then
      -- Most messages are like that: they leave as they are.
      count, ids, found_bodies, offset, bytes_left = #due_ids, due_ids, due_bodies, #due_ids, bytes_left - size
      due_ids = none
    end
    local due_records = some_tried and redis.call('HMGET', attempts, unpack(due_ids)) or none
    local due_expiries = some_expire and redis.call('HMGET', expiries, unpack(due_ids)) or none
    for i, id in ipairs(due_ids) do
      if count == limit then break end
      local body, record = due_bodies[i], due_records[i] and parse_record(due_records[i]) or new
      local is_plain = body and record == new and not due_expiries[i]
      if is_plain or not is_gone(id, priority, record, body, due_expiries[i]) then
        if count > 0 and #body > bytes_left then
          is_full = true
          break
        end
        hand_out(id, priority, record, body)
      end
      offset = offset + 1
    end
    looks_left, passed[priority] = looks_left - #due_bodies, offset
  end
end

-- Return the end of leases that end about then, with this rest by two, as text. An end names one
-- claim. Two zeros at its end are avoided, because servers may write such numbers in other ways.
local function new_token(ends, rest)
  ends = ends + (ends + rest) % 2
  while ends % 100 == 0 or redis.call('ZCOUNT', leased, ends, ends) > 0 do ends = ends + 2 end
  return string.format('%.0f', ends)
end

local function is_some_lost()
  local first_end = tonumber(redis.call('ZRANGE', leased, 0, 0, 'WITHSCORES')[2])
  return first_end and first_end <= now
end

local some_lost, some_trials, all_grouped = is_some_lost(), false, false
-- The work that groups or a limit add to a claim. Most queues have neither, and do not even create
-- these functions.
local by_turns
if some_grouped or queue_limit or settled_to then
-- include: groups
  -- The lines that were opened, by group; those of which messages were handed out; and these
  -- messages: their ids, members of `lines`, and lines.
  local opened, served, left_ids, left_members, left_lines = {}, {}, {}, {}, {}
  local limit_of_queue, has_trials, has_taken_turns, last_ungrouped = parse_limit(queue_limit), false, false, nil
  local now_text, usual_level, held_level = format_moment19(now), string.byte('9'), string.byte('!')

  -- Return what this claim knows about a group, which is not opened yet. All fields are named here,
  -- because a table that grows is copied again and again. Of its line, `members` were read last, and
  -- `at` is the next of them. Those up to `due_to` are due and of the usual level; of those up to
  -- `ids_to`, `ids` and `its_bodies` have the ids and bodies, `before` places further on.
  local function new_line(group)
    local base = group .. '\0'
    return {
      group = group, base = base, from = '[' .. base .. '!', members = none, at = 1, due_to = 0, ids = none,
      limit = false, its_bodies = none, before = 0, ids_to = 0, is_whole = false, soonest = false, room = false,
      running = 0, first_end = false, left = 0, last = false, new_place = false,
    }
  end

  -- Read the state of lines, and which of their messages may be taken.
  local function open_lines(lines_to_open)
    local groups = {}
    for i, line in ipairs(lines_to_open) do groups[i] = line.group end
    local limits, are_paused = limits_of(groups)
    for i, line in ipairs(lines_to_open) do
      local group = groups[i]
      local its_limit = limits[group]
      line.limit, line.room = its_limit or false, math.huge
      if its_limit then
        if its_limit.concurrency then line.running, line.first_end = running_of(group, now) end
        line.room = room_of(its_limit, group, now, line.running, line.first_end)
      end
      if are_paused[group] then line.room = 0 end
      opened[group] = line
    end
  end

  local function is_ordered(line) return line.limit and line.limit.ordered end

  -- Return whether a member of a line is due.
  local function is_due(line, member) return string.sub(member, #line.base + 2, #line.base + 20) <= now_text end

  -- Return the next due message of a line, as a member of `lines`; nil if none is left: then
  -- `soonest` is when the next one comes due. Read about as many as are wanted at once.
  local function next_in(line, most)
    while true do
      local at = line.at
      local member = line.members[at]
      if member then
        if at <= line.due_to or is_due(line, member) then
          line.at = at + 1
          return member
        end
        local level, due = level_and_moment(member)
        if due <= now then
          -- Its moment cannot be read.
          line.at = at + 1
          return member
        end
        line.soonest = math.min(line.soonest or due, due)
        local is_end = level == '9' or level == '!' and is_ordered(line)
        line.from = not is_end and '[' .. line.base .. string.char(string.byte(level) + 1)
        line.members, line.at, line.is_whole = none, 1, false
      elseif line.is_whole or not line.from then
        line.from = nil
        return nil
      else
        -- One more tells whether there is another turn.
        local wanted = math.max(1, math.min(most, line.room))
        local found = redis.call('ZRANGEBYLEX', lines, line.from, '(' .. line.base .. ':', 'LIMIT', 0, wanted + 1)
        line.members, line.at, line.due_to, line.ids_to, line.is_whole = found, 1, 0, 0, #found <= wanted
        local last = found[#found]
        if last then
          line.from = '(' .. last
          -- They are in order: if the last one is of the usual level and due, and the first one is
          -- of that level, then all are.
          local at_level = #line.base + 1
          local are_usual = string.byte(found[1], at_level) == usual_level and string.byte(last, at_level) == usual_level
          if are_usual and is_due(line, last) then line.due_to = #found end
        end
      end
    end
  end

  -- Read the bodies of the messages that these lines are about to give, this number each.
  local function read_bodies(some_lines, most)
    local wanted, size = {}, 0
    for _, line in ipairs(some_lines) do
      if line.room > 0 and not line.members[line.at] then
        -- This reads the line, and puts the message back.
        if next_in(line, most) then line.at = line.at - 1 end
        local wants = math.max(1, math.min(most, line.room))
        line.ids, line.before = wanted, size + 1 - line.at
        local members, id_at = line.members, #line.base + 21
        for at = line.at, math.min(#members, line.at + wants - 1) do
          size = size + 1
          wanted[size] = string.sub(members[at], id_at)
        end
        line.ids_to = size - line.before
      end
    end
    if size == 0 then return end
    -- If bodies are large, do not read those that would not leave anyway.
    local fitting = size > 1 and math.floor(bytes_left / math.max(1, redis.call('HSTRLEN', bodies, wanted[1]))) or 0
    local found = none
    if fitting > 1 then found = redis.call('HMGET', bodies, unpack(wanted, 1, math.min(fitting, size))) end
    for _, line in ipairs(some_lines) do
      if line.ids == wanted then line.its_bodies = found end
    end
  end

  -- Hand out a message of a group.
  local function hand_out_of(line, id, member, priority, record, body)
    hand_out(id, priority, record, body)
    local at = #left_ids + 1
    left_ids[at], left_members[at], left_lines[at] = id, member, line
    if not line.last then served[#served + 1] = line end
    line.room, line.last, line.left = line.room - 1, count, line.left + 1
  end

  -- Hand out the next message of a line, and return whether there was one.
  local function take_in(line, most)
    while line.room > 0 and looks_left > 0 do
      local member = next_in(line, most)
      if not member then return false end
      looks_left = looks_left - 1
      local at, id, body = line.at - 1, nil, nil
      if at <= line.ids_to then id, body = line.ids[at + line.before], line.its_bodies[at + line.before] end
      id = id or string.sub(member, #line.base + 21)
      if body == nil then body = redis.call('HGET', bodies, id) end
      local record, priority = some_tried and redis.call('HGET', attempts, id), 0
      record = record and parse_record(record) or new
      local level = string.byte(member, #line.base + 1)
      if level ~= usual_level then
        priority = level == held_level and priority_of(id) or usual_level - level
      end
      local is_plain = body and record == new and not some_expire
      if is_plain or not is_gone(id, priority, record, body, some_expire and redis.call('HGET', expiries, id)) then
        is_full = count > 0 and #body > bytes_left
        if is_full then
          line.at = at
          return false
        end
        hand_out_of(line, id, member, priority, record, body)
        return true
      end
    end
    return false
  end

  -- Return the first suspect of a group, of those whose turn it is.
  local function find_suspect_of_group()
    for _, group in ipairs(redis.call('ZRANGEBYSCORE', trials, '-inf', now, 'LIMIT', 0, 10)) do
      local line = new_line(group)
      open_lines({line})
      local member = redis.call('ZRANGEBYLEX', lines, '[' .. line.base .. '?', '(' .. line.base .. '@', 'LIMIT', 0, 1)[1]
      if member and line.room > 0 then
        local id = id_in_line(member)
        local body, record = redis.call('HGET', bodies, id), parse_record(redis.call('HGET', attempts, id))
        local priority = priority_of(id)
        if not is_gone(id, priority, record, body, redis.call('HGET', expiries, id)) then
          return {id = id, priority = priority, record = record, body = body, line = line, member = member}
        end
      end
    end
  end

  -- Take messages that belong to no group, up to this number of messages in all.
  local function take_ungrouped(most)
    local before, whole = count, limit
    limit = most
    for priority = highest, 0, -1 do take_from(priority) end
    limit = whole
    return count > before
  end

  -- Open lines to take from them. A group that was ordered just now may have a turn that it must not
  -- have: whatever has been handed out holds it up.
  local function open_to_take(lines_to_open)
    open_lines(lines_to_open)
    for _, line in ipairs(settled_to and lines_to_open or none) do
      if is_ordered(line) and first_behind(line.group) then line.room = 0 end
    end
  end

  -- Groups take turns, and the messages without a group count as one more of them.
  local function take_turns()
    has_taken_turns = true
    -- One of them may be the queue itself.
    local most = limit + (queue_limit and 1 or 0)
    local groups, sources, first_ungrouped = redis.call('ZRANGEBYSCORE', turns, '-inf', now, 'WITHSCORES', 'LIMIT', 0, most), {}, nil
    all_grouped = true
    for priority = highest, 0, -1 do
      local due = tonumber(redis.call('ZRANGE', waiting[priority], 0, 0, 'WITHSCORES')[2])
      if due then all_grouped = false end
      if due and due <= now then first_ungrouped = math.min(first_ungrouped or due, due) end
    end
    if first_ungrouped and #groups > 0 then
      first_ungrouped = math.max(first_ungrouped, number_or(0, redis.call('HGET', settings, 'turn')))
    end
    for i = 1, #groups, 2 do
      if first_ungrouped and first_ungrouped < tonumber(groups[i + 1]) then
        sources[#sources + 1], first_ungrouped = false, nil
      end
      if groups[i] ~= '' then sources[#sources + 1] = new_line(groups[i]) end
    end
    if first_ungrouped then sources[#sources + 1] = false end
    while #sources > 0 and count < limit and looks_left > 0 and not is_full do
      local still, unopened, asked = {}, {}, {}
      local each = math.ceil((limit - count) / #sources)
      for i = 1, math.min(#sources, limit - count) do
        local line = sources[i]
        if line then asked[#asked + 1] = line end
        if line and not line.room then unopened[#unopened + 1] = line end
      end
      if #unopened > 0 then open_to_take(unopened) end
      read_bodies(asked, each)
      -- A group that is alone takes all its turns at once.
      local is_alone = #sources == 1
      for _, line in ipairs(sources) do
        local took = false
        if line and not line.room and count < limit and not is_full then open_to_take({line}) end
        repeat
          if count == limit or is_full then
            took = false
          elseif line then
            took = take_in(line, each)
          else
            took = take_ungrouped(is_alone and limit or count + 1)
            if took then last_ungrouped = count end
          end
        until not took or not is_alone
        if took then still[#still + 1] = line end
      end
      sources = still
    end
    if #groups == 0 then last_ungrouped = nil end
  end

  -- Give the next groups their turns by limits that have changed since they got them.
  local function settle_next()
    check_groups()
    -- The first write frees memory: then a full server accepts the rest.
    redis.call('ZREM', turns, '')
    local groups = {}
    for _ = 1, 50 do
      local member = redis.call('ZRANGEBYLEX', lines, '(' .. settled_to, '+', 'LIMIT', 0, 1)[1]
      -- A member without a NUL is foreign.
      local group = member and string.match(member, '^(%Z+)%z')
      settled_to = group and behind(group, member) or member
      if group then groups[#groups + 1] = group end
      if not member then break end
    end
    -- They have waited longer than those that this claim serves, which go behind them. A moment that
    -- this announces may have passed, but a change of settings makes each client look anyway.
    settle(groups, now - limit)
    if settled_to then redis.call('HSET', settings, 'settled_to', settled_to) else redis.call('HDEL', settings, 'settled_to') end
  end

  -- Let the messages of groups whose leases are lost wait in the lines of their groups, as suspects.
  local function line_up_lost()
    local ids_and_ends = redis.call('ZRANGEBYSCORE', leased, '-inf', now, 'WITHSCORES', 'LIMIT', 0, 100)
    local groups, is_checked = {}, false
    for i = 1, #ids_and_ends, 2 do
      local id, ends = ids_and_ends[i], tonumber(ids_and_ends[i + 1])
      local place = redis.call('HGET', places, id)
      if place then
        local record = parse_record(redis.call('HGET', attempts, id))
        if not is_checked then
          check_details()
          check_groups()
          is_checked = true
        end
        lose(record, ends)
        record.mark = ':r'
        redis.call('ZREM', leased, id)
        redis.call('HDEL', tokens, id)
        save_record(id, record)
        some_tried = true
        line_up(id, group_of(place), '?', ends, place)
        add_group(groups, group_of(place))
      end
    end
    settle(groups, now, true)
  end

  local function room_of_queue()
    local after = string.format('(%.0f', now)
    local running = limit_of_queue.concurrency and redis.call('ZCOUNT', leased, after, '+inf')
    return room_of(limit_of_queue, '', now, running, function()
      return tonumber(redis.call('ZRANGEBYSCORE', leased, after, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2])
    end)
  end

  -- Fail if a key of a foreign type would be written: taking turns has read some already.
  local function check_turns()
    if some_grouped and (not has_taken_turns or #gone > 0) then
      check_groups()
    elseif #left_ids > 0 then
      redis.call('HGET', places, '')
      redis.call('ZSCORE', grouped, '')
    end
    if queue_limit then redis.call('ZSCORE', turns, '') end
  end

  -- Take messages that are gone out of their lines, whose turns change then.
  local function leave()
    for _, group in ipairs(leave_lines(gone)) do opened[group] = opened[group] or new_line(group) end
  end

  -- Return the next turn of a line, of which messages were handed out with this end of their lease.
  local function turn_after(line, ends)
    -- Whatever has been handed out holds an ordered group up.
    if is_ordered(line) then return nil end
    local due = next_in(line, 1) and 0 or line.soonest
    if not due or line.room > 0 then return due end
    local function first_end() return line.running == 0 and ends or line.first_end() end
    local _, from = room_of(line.limit, line.group, now, line.running + line.left, first_end)
    return math.max(due, from)
  end

  -- Count what was handed out as started, by the rates.
  local function note_starts()
    local starting, groups, longest, beginnings = {}, {}, 0, {}
    local function start(id, group, its_limit)
      if not beginnings[group] then
        beginnings[group], groups[#groups + 1] = start_of(group, its_limit, now), group
        longest = math.max(longest, its_limit.per)
      end
      starting[#starting + 1] = beginnings[group] .. id
    end
    for i, id in ipairs(left_ids) do
      local line = left_lines[i]
      if line.limit and line.limit.rate then start(id, line.group, line.limit) end
    end
    if limit_of_queue and limit_of_queue.rate then
      for _, id in ipairs(ids) do start(id, '', limit_of_queue) end
    end
    if #starting > 0 then log_starts(starting, groups, longest, now) end
  end

  -- Move what was handed out to its places in the lines, and give its groups their next turns.
  local function note_left(token)
    local moved, new_places = {}, {}
    local place_of_all = '~' .. format_moment19(tonumber(token))
    for i, id in ipairs(left_ids) do
      local line = left_lines[i]
      line.new_place = line.new_place or line.base .. place_of_all
      moved[2 * i - 1], moved[2 * i] = 0, line.new_place .. id
      new_places[2 * i - 1], new_places[2 * i] = id, line.new_place
    end
    if #left_ids > 0 then
      redis.call('ZREM', lines, unpack(left_members))
      redis.call('ZREM', grouped, unpack(left_ids))
      redis.call('ZADD', lines, unpack(moved))
      redis.call('HSET', places, unpack(new_places))
    end
    note_starts()
    if last_ungrouped then redis.call('HSET', settings, 'turn', format_score(now - (count - last_ungrouped) / 4)) end
    local groups, served_at, next_turns, without_turn = {}, {}, {}, {}
    for i, line in ipairs(served) do
      local group, moment = line.group, now - (count - line.last) / 4
      groups[i], served_at[group] = group, moment
      if not has_trials then
        local turn = turn_after(line, tonumber(token))
        if turn then
          next_turns[#next_turns + 1], next_turns[#next_turns + 2] = format_score(math.max(turn, moment)), group
        else
          without_turn[#without_turn + 1] = group
        end
      end
    end
    if has_trials then settle(groups, now, false, served_at) end
    if #without_turn > 0 then redis.call('ZREM', turns, unpack(without_turn)) end
    if #next_turns > 0 then redis.call('ZADD', turns, unpack(next_turns)) end
  end

  -- Correct the turns of the others, whose limits may have changed since they got them. Return the
  -- time until the next turn, and whether suspects may be handed out.
  local function settle_others()
    local wait, has_suspects = -1, false
    if not some_grouped then return wait, has_suspects end
    local groups = {}
    for group, line in pairs(opened) do
      if not line.last then groups[#groups + 1] = group end
    end
    if #groups > 0 then
      settle(groups, now)
      has_trials = true
    end
    local soonest = redis.call('ZRANGEBYSCORE', turns, '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, 2)
    -- The empty name is the queue itself.
    local at = soonest[1] == '' and 4 or 2
    if soonest[at] then wait = math.max(0, math.ceil(tonumber(soonest[at])) - now) end
    if has_trials then
      has_suspects = redis.call('ZCOUNT', trials, '-inf', now) > 0
      local later = redis.call('ZRANGEBYSCORE', trials, '(' .. format_score(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
      if later then wait = shorter_wait(wait, math.max(0, math.ceil(tonumber(later)) - now)) end
    end
    return wait, has_suspects
  end

  -- Let the queue itself wait for its slot, if its limit lets nothing run now but messages wait.
  -- Return the time until the next look.
  local function wait_for_slot(wait, has_suspects)
    if not queue_limit then return wait, has_suspects end
    local room, moment = 1, now
    if limit_of_queue then room, moment = room_of_queue() end
    if room <= 0 and moment > now and (has_suspects or wait >= 0 and wait < moment - now) then
      redis.call('ZADD', turns, format_score(moment), '')
      return moment - now, false
    end
    redis.call('ZREM', turns, '')
    return wait, has_suspects
  end

  if settled_to then settle_next() end
  if some_grouped then
    if some_lost then
      line_up_lost()
      some_lost = is_some_lost()
    end
    local first_trial = tonumber(redis.call('ZRANGE', trials, 0, 0, 'WITHSCORES')[2])
    has_trials, some_trials = first_trial ~= nil, first_trial ~= nil and first_trial <= now
  end
  if limit_of_queue then limit = math.max(0, math.min(limit, (room_of_queue()))) end
  by_turns = {
    hand_out_of = hand_out_of, find_suspect = find_suspect_of_group, take = take_turns, check = check_turns, leave = leave,
    note_left = note_left, settle_others = settle_others, wait_for_slot = wait_for_slot,
  }
end

local may_have_suspect = suspects == '1' and (some_lost or some_trials) and limit > 0
if may_have_suspect and held_id ~= '' then may_have_suspect = (lease_end(held_id, held_token) or 0) <= now end
local suspect = may_have_suspect and (some_lost and find_suspect() or some_trials and by_turns.find_suspect()) or nil
local is_suspect = false
if some_grouped and suspect then
  is_suspect = true
  if suspect.line then
    by_turns.hand_out_of(suspect.line, suspect.id, suspect.member, suspect.priority, suspect.record, suspect.body)
  else
    hand_out(suspect.id, suspect.priority, suspect.record, suspect.body)
  end
elseif some_grouped then
  by_turns.take()
end
for priority = some_grouped and -1 or highest, 0, -1 do
  if suspect and count == 0 and suspect.priority >= priority then
    is_suspect = true
    hand_out(suspect.id, suspect.priority, suspect.record, suspect.body)
    break
  end
  take_from(priority)
end

-- A key of a foreign type must fail before the first write.
if some_kept or is_suspect then redis.call('HGET', tokens, '') end
if #gone > 0 then
  check_details()
  fates()
end
if #deaths > 0 then check_letters() end
if by_turns then by_turns.check() end
-- First the writes that free memory: then a full server accepts the rest.
for priority, seen in pairs(passed) do
  if seen > 0 then redis.call('ZREMRANGEBYRANK', waiting[priority], 0, seen - 1) end
end
if #gone > 0 then
  if some_grouped then by_turns.leave() end
  redis.call('ZREM', leased, unpack(gone))
  delete_details(gone)
end
for _, death in ipairs(deaths) do add_letter(death[1], death[2], death[3], now) end
if #gone > 0 then
  local _, keep_dead, max_dead, keep = fates()
  if #deaths > 0 then trim_letters(number_or(0, keep_dead), number_or(0, max_dead), now) end
  -- A hint for the clients that wait for the end of one of them: they look now and then.
  for _, id in ipairs(keep and gone or {}) do redis.pcall('PUBLISH', settings, 'finished ' .. id) end
end
local token = ''
if count > 0 then
  local in_company = not is_suspect and (count > 1 or company == '1')
  token = new_token(end_of_lease(now, lease_us), in_company and 1 or 0)
  -- The last one first, because their ends are equal: so a small set finds each place at once.
  local new_ends = {}
  for i = 1, count do new_ends[i * 2 - 1], new_ends[i * 2] = token, ids[count + 1 - i] end
  if some_kept or is_suspect then redis.call('HDEL', tokens, unpack(ids)) end
  redis.call('ZADD', leased, unpack(new_ends))
  if is_suspect then
    suspect.record.mark = ':s'
    save_record(suspect.id, suspect.record)
  end
  if by_turns then by_turns.note_left(token) end
  redis.call('SET', call, number .. ' ' .. token, 'PX', math.ceil(lease_us / 1000))
end

local wait, has_suspects = -1, some_lost and redis.call('ZCOUNT', leased, '-inf', now) > 0
if by_turns then
  local some_suspects
  wait, some_suspects = by_turns.settle_others()
  has_suspects = has_suspects or some_suspects
end
if not all_grouped then
  for priority = highest, 0, -1 do wait = shorter_wait(wait, wait_us(waiting[priority], now, 1)) end
end
if by_turns then wait, has_suspects = by_turns.wait_for_slot(wait, has_suspects) end
-- The next claim goes on with them.
if settled_to then wait = 0 end
local next_end = redis.call('ZRANGEBYSCORE', leased, string.format('(%.0f', now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
if next_end then wait = shorter_wait(wait, math.min(tonumber(next_end), MAX_SCORE) - now) end
local listeners = count > 0 and give_notice(wake, now, has_suspects and 0 or wait, now, signature) or 0
return {
  now, wait, expired_count, died_count, listeners, token, ids, found_bodies, details, is_suspect and 1 or 0,
  has_suspects and 1 or 0, occurrences,
}
