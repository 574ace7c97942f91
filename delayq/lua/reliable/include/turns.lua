-- turns: how a claim takes messages of groups, which take turns, and keeps to limits. Needs groups
-- and what claim.lua knows. This is the body of a function of claim.lua, and returns the functions
-- that claim.lua calls.

  -- Lines are known by their groups once they are opened. Of some of them messages were handed out:
  -- their ids, members of `group_members`, and lines.
  local opened, served, left_ids, left_members, left_lines = {}, {}, {}, {}, {}
  -- The ids that were read from lines so far, and their bodies: nil if they do not fit.
  local read_ids, read_bodies = {}, {}
  local limit_of_queue, starts_of_queue = parse_limit(queue_limit), nil
  local has_trials, has_taken_turns, last_ungrouped = false, false, nil
  local now_text, usual_level, held_level = format_moment19(now), string.byte('9'), string.byte('!')

  -- The rare work, of which each claim needs a part at most once or twice.
  local function rare()
-- include: settle
-- include: kept_slots
    return settle, leave_lines, line_up, level_of, free_slots, first_due
  end

  -- Return what this claim knows about a group. All fields are named here, because a table that grows
  -- is copied again and again. Of its line, `members` were read last, and `at` is the next of them.
  -- Those up to `due_to` are due and of the usual level; those up to `read_to` are in `read_ids`,
  -- `before` places further on. `from` is where to read on; `room` how many more may run.
  local function new_line(group)
    local base = group .. '\0'
    return {
      group = group, base = base, from = '[' .. base .. '!', members = none, at = 1, due_to = 0, read_to = 0, before = 0,
      limit = false, room = false, starts = false, soonest = false, left = 0, last = false, place = false,
    }
  end

  -- Read the limits of these lines, and how many of their messages may run.
  local function open_lines(some_lines)
    local groups = {}
    for i, line in ipairs(some_lines) do groups[i] = line.group end
    local limits, are_paused = limits_of(groups)
    for i, line in ipairs(some_lines) do
      local group = groups[i]
      local its_limit = limits[group]
      opened[group], line.room = line, math.huge
      if its_limit then
        line.limit, line.room, line.starts = its_limit, room_of(its_limit, group, now, limit, running_of)
      end
      if are_paused[group] then line.room = 0 end
    end
  end

  local function is_ordered(line) return line.limit and line.limit.ordered end

  -- Open lines to take from them. A group that was ordered just now may have a turn that it must not
  -- have: whatever has been handed out holds it up.
  local function open_to_take(some_lines)
    open_lines(some_lines)
    for _, line in ipairs(turns_updated_to and some_lines or none) do
      if is_ordered(line) and first_behind(line.group) then line.room = 0 end
    end
  end

  -- Read on in a line, about as many members as are wanted. One more tells whether there is another
  -- turn.
  local function read_on(line, most)
    local base, wanted = line.base, math.max(1, math.min(most, line.room))
    local found = redis.call('ZRANGEBYLEX', group_members, line.from, '(' .. base .. ':', 'LIMIT', 0, wanted + 1)
    local size = #found
    line.members, line.at, line.due_to, line.read_to, line.from = found, 1, 0, 0, false
    if size > wanted then line.from = '(' .. found[size] end
    -- They are in order: if the last one is of the usual level and due, and the first one is of that
    -- level, then all are.
    local at = #base + 1
    local is_usual = size > 0 and string.byte(found[1], at) == usual_level and string.byte(found[size], at) == usual_level
    if is_usual and string.sub(found[size], at + 1, at + 19) <= now_text then line.due_to = size end
  end

  -- Return the next due message of a line, as a member of `group_members`; nil if none is left: then
  -- `soonest` is when the next one comes due.
  local function next_in(line, most)
    while true do
      local at = line.at
      local member = line.members[at]
      if member then
        line.at = at + 1
        if at <= line.due_to then return member end
        local level, due = level_and_moment(member)
        -- It is also due if its moment cannot be read.
        if due <= now then return member end
        line.soonest = math.min(line.soonest or due, due)
        local is_end = level == '9' or level == '!' and is_ordered(line)
        line.from = not is_end and '[' .. line.base .. string.char(string.byte(level) + 1)
        line.members, line.at = none, 1
      elseif line.from then
        read_on(line, most)
      else
        return nil
      end
    end
  end

  -- Read the bodies of the messages that these lines are about to give, this number each.
  local function read_ahead(some_lines, most)
    local size = #read_ids
    local first = size + 1
    for _, line in ipairs(some_lines) do
      if line.room > 0 and not line.members[line.at] then
        -- This reads the line, and puts the message back.
        if next_in(line, most) then line.at = line.at - 1 end
        local members, id_at = line.members, #line.base + 21
        line.before = size + 1 - line.at
        for at = line.at, math.min(#members, line.at + math.max(1, math.min(most, line.room)) - 1) do
          size = size + 1
          read_ids[size] = string.sub(members[at], id_at)
        end
        line.read_to = size - line.before
      end
    end
    if size <= first then return end
    -- If bodies are large, do not read those that would not leave anyway.
    local fitting = math.floor(bytes_left / math.max(1, redis.call('HSTRLEN', bodies, read_ids[first])))
    if fitting > 1 then
      local found = redis.call('HMGET', bodies, unpack(read_ids, first, math.min(first + fitting - 1, size)))
      for i = 1, #found do read_bodies[first + i - 1] = found[i] end
    end
  end

  -- Hand out a message of a group.
  local function hand_out_of(line, id, member, priority, record, body, expiry)
    hand_out(id, priority, record, body, expiry)
    local left = #left_ids + 1
    left_ids[left], left_members[left], left_lines[left] = id, member, line
    if not line.last then served[#served + 1] = line end
    line.room, line.left, line.last = line.room - 1, line.left + 1, count
  end

  -- Hand out the next message of a line, and return whether there was one.
  local function take_in(line, most)
    while line.room > 0 and looks_left > 0 do
      local member = next_in(line, most)
      if not member then return false end
      looks_left = looks_left - 1
      local at, id, body = line.at - 1, nil, nil
      if at <= line.read_to then id, body = read_ids[at + line.before], read_bodies[at + line.before] end
      id = id or string.sub(member, #line.base + 21)
      if body == nil then body = redis.call('HGET', bodies, id) end
      local record, priority = some_tried and redis.call('HGET', attempts, id), 0
      record = record and parse_record(record) or new
      if at > line.due_to then
        local level = string.byte(member, #line.base + 1)
        priority = level == held_level and priority_of(id) or usual_level - level
      end
      local expiry = some_expire and redis.call('HGET', expiries, id)
      local is_plain = body and record == new and not some_expire
      if is_plain or not is_gone(id, priority, record, body, expiry) then
        is_full = count > 0 and #body > bytes_left
        if is_full then
          line.at = at
          return false
        end
        hand_out_of(line, id, member, priority, record, body, expiry)
        return true
      end
    end
    return false
  end

  -- Return the first suspect of a group, of those whose turn it is.
  local function find_suspect_of_group()
    for _, group in ipairs(redis.call('ZRANGEBYSCORE', suspect_turns, '-inf', now, 'LIMIT', 0, 10)) do
      local line = new_line(group)
      open_lines({line})
      local member = redis.call('ZRANGEBYLEX', group_members, '[' .. line.base .. '?', '(' .. line.base .. '@', 'LIMIT', 0, 1)[1]
      if member and line.room > 0 then
        local id = id_in_line(member)
        local body, record = redis.call('HGET', bodies, id), parse_record(redis.call('HGET', attempts, id))
        local priority, expiry = priority_of(id), redis.call('HGET', expiries, id)
        if not is_gone(id, priority, record, body, expiry) then
          return {id = id, priority = priority, record = record, body = body, expiry = expiry, line = line, member = member}
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

  -- Groups take turns, and the messages without a group count as one more of them.
  local function take_turns()
    has_taken_turns = true
    -- One of them may be the queue itself.
    local most = limit + (queue_limit and 1 or 0)
    local groups, sources, first_ungrouped = redis.call('ZRANGEBYSCORE', group_turns, '-inf', now, 'WITHSCORES', 'LIMIT', 0, most), {}, nil
    all_grouped = true
    for priority = highest, 0, -1 do
      local due = tonumber(redis.call('ZRANGE', waiting[priority], 0, 0, 'WITHSCORES')[2])
      if due then all_grouped = false end
      if due and due <= now then first_ungrouped = math.min(first_ungrouped or due, due) end
    end
    if first_ungrouped and #groups > 0 then
      first_ungrouped = math.max(first_ungrouped, number_or(0, redis.call('HGET', settings, 'ungrouped_turn')))
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
      read_ahead(asked, each)
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
    check_messages()
    -- The first write frees memory: then a full server accepts the rest.
    redis.call('ZREM', group_turns, '')
    local groups = {}
    for _ = 1, 50 do
      local member = redis.call('ZRANGEBYLEX', group_members, '(' .. turns_updated_to, '+', 'LIMIT', 0, 1)[1]
      -- A member without a NUL is foreign.
      local group = member and string.match(member, '^(%Z+)%z')
      turns_updated_to = group and behind(group, member) or member
      if group then groups[#groups + 1] = group end
      if not member then break end
    end
    -- They have waited longer than those that this claim serves, which go behind them. A moment that
    -- this announces may have passed, but a change of settings makes each client look anyway.
    local settle = rare()
    settle(groups, now - limit)
    if turns_updated_to then redis.call('HSET', settings, 'turns_updated_to', turns_updated_to) else redis.call('HDEL', settings, 'turns_updated_to') end
  end

  -- Let messages wait in the lines of their groups whose leases are lost, of which `lost` has {id,
  -- record, ends, body, place} each.
  local function line_up_lost(lost)
    local settle, _, line_up, level_of = rare()
    local groups = {}
    for _, message in ipairs(lost) do
      local id, record, ends, body, place = unpack(message)
      local group = group_of(place)
      redis.call('ZREM', leased, id)
      if is_suspect(record) then
        line_up(id, group, '?', ends, place)
      else
        line_up(id, group, level_of(group, place, priority_of(id)), due_of(record, body), place)
      end
      add_group(groups, group)
    end
    -- They have waited longer than those that this claim serves, which go behind them.
    settle(groups, now - limit, true)
  end

  -- Return how many messages run, with those that were cancelled and keep their slots.
  local function running_in_queue()
    local from = string.format('(%.0f', now)
    return redis.call('ZCOUNT', leased, from, '+inf') + (some_kept_slots and redis.call('ZCOUNT', kept_slots, from, '+inf') or 0)
  end

  local function first_end_in_queue()
    local from = string.format('(%.0f', now)
    local first = tonumber(redis.call('ZRANGEBYSCORE', leased, from, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2])
    local kept = some_kept_slots and tonumber(redis.call('ZRANGEBYSCORE', kept_slots, from, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2])
    return kept and math.min(first or kept, kept) or first
  end

  -- Fail if a key of a foreign type would be written: taking turns has read some already.
  local function check_turns()
    if some_grouped and (not has_taken_turns or #gone > 0) then check_groups() end
    if queue_limit and not has_taken_turns then redis.call('ZSCORE', group_turns, '') end
  end

  -- Take out what is handed out.
  local function take_out()
    if #left_ids == 0 then return end
    redis.call('ZREM', group_waiting, unpack(left_ids))
    redis.call('ZREM', group_members, unpack(left_members))
  end

  -- Take messages that are gone out of their lines, whose turns change then.
  local function leave()
    local _, leave_lines = rare()
    for _, group in ipairs(leave_lines(gone)) do opened[group] = opened[group] or new_line(group) end
  end

  -- Count what was handed out as started, by the rates.
  local function note_starts()
    local added, longest = {}, 0
    local function start(group, its_limit, counted, started)
      local base, before, after = group .. '\0', counted.after, counted.after + started
      -- Those that count no more make room.
      if counted.first or counted.over == counted.after and counted.last > 0 then
        redis.call('ZREMRANGEBYLEX', rate_log, '[' .. base, '(' .. base .. format_moment19(now - its_limit.per) .. '\255')
      end
      if counted.last >= now then
        -- The clock was set back. Starts in the future count as if they were made now, so that moments
        -- and numbers have the same order.
        local from, to = '[' .. base .. format_moment19(now), '(' .. base .. ':'
        local first = redis.call('ZRANGEBYLEX', rate_log, from, to, 'LIMIT', 0, 1)[1]
        before = tonumber(string.match(first or '', '^%S+ %S+ (%d+)', #base + 1)) or before
        redis.call('ZREMRANGEBYLEX', rate_log, from, to)
      end
      added[#added + 1] = 0
      added[#added + 1] = base .. format_moment19(now) .. ' ' .. its_limit.per .. ' ' .. before .. ' ' .. after .. ' ' .. counted.over
      longest = math.max(longest, its_limit.per)
    end
    for _, line in ipairs(served) do
      if line.starts then start(line.group, line.limit, line.starts, line.left) end
    end
    if starts_of_queue then start('', limit_of_queue, starts_of_queue, count) end
    if #added == 0 then return end
    -- Other groups may never come again. If most of a few that chance picks count no more, more of
    -- those make room than have come since the last time.
    if now % 4 == 0 then
      local few = 4 + math.floor(#added / 8)
      local over = starts_over(redis.call('ZRANDMEMBER', rate_log, -few), now)
      if #over > few / 2 then
        over = starts_over(redis.call('ZRANDMEMBER', rate_log, -4 * (#added + 2)), now)
        redis.call('ZREM', rate_log, '', unpack(over))
      end
    end
    redis.call('ZADD', rate_log, unpack(added))
    local keep_ms = math.ceil(longest / 1000)
    if redis.call('PTTL', rate_log) < keep_ms then redis.call('PEXPIRE', rate_log, 2 * keep_ms) end
  end

  -- Return the next turn of a line of which messages were handed out.
  local function turn_after(line)
    -- Whatever has been handed out holds an ordered group up.
    if is_ordered(line) then return nil end
    local due = next_in(line, 1) and 0 or line.soonest
    if not due or line.room > 0 then return due end
    return math.max(due, free_from(line.limit, line.group, now, running_of, first_end_of))
  end

  -- Give what was handed out its places in the lines, and its groups their next turns.
  local function note_left(token)
    local moved, new_places = {}, {}
    local place_of_all = '~' .. format_moment19(tonumber(token))
    for i, id in ipairs(left_ids) do
      local line = left_lines[i]
      local place = line.place or line.base .. place_of_all
      line.place = place
      moved[2 * i - 1], moved[2 * i] = 0, place .. id
      new_places[2 * i - 1], new_places[2 * i] = id, place
    end
    if #left_ids > 0 then
      redis.call('ZADD', group_members, unpack(moved))
      redis.call('HSET', positions, unpack(new_places))
    end
    note_starts()
    if last_ungrouped then redis.call('HSET', settings, 'ungrouped_turn', format_score(now - (count - last_ungrouped) / 4)) end
    if has_trials then
      local groups, served_at = {}, {}
      for i, line in ipairs(served) do groups[i], served_at[line.group] = line.group, now - (count - line.last) / 4 end
      local settle = rare()
      settle(groups, now, false, served_at)
      return
    end
    local next_turns, without_turn = {}, {}
    for _, line in ipairs(served) do
      local turn = turn_after(line)
      if turn then
        local at = #next_turns
        next_turns[at + 1], next_turns[at + 2] = format_score(math.max(turn, now - (count - line.last) / 4)), line.group
      else
        without_turn[#without_turn + 1] = line.group
      end
    end
    if #without_turn > 0 then redis.call('ZREM', group_turns, unpack(without_turn)) end
    if #next_turns > 0 then redis.call('ZADD', group_turns, unpack(next_turns)) end
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
      local settle = rare()
      settle(groups, now)
      has_trials = true
    end
    local soonest = redis.call('ZRANGEBYSCORE', group_turns, '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, 2)
    -- The empty name is the queue itself.
    local at = soonest[1] == '' and 4 or 2
    if soonest[at] then wait = math.max(0, math.ceil(tonumber(soonest[at])) - now) end
    if has_trials then
      has_suspects = redis.call('ZCOUNT', suspect_turns, '-inf', now) > 0
      local later = redis.call('ZRANGEBYSCORE', suspect_turns, '(' .. format_score(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
      if later then wait = shorter_wait(wait, math.max(0, math.ceil(tonumber(later)) - now)) end
    end
    return wait, has_suspects
  end

  -- Return whether the limit of one of these groups holds back a message that is due. An ordered
  -- group has no turn while one of its messages runs.
  local function holds_one(groups)
    local _, _, _, _, _, first_due = rare()
    local limits, are_paused = limits_of(groups)
    for _, group in ipairs(groups) do
      local its_limit = not are_paused[group] and limits[group]
      local due = its_limit and first_due(group, its_limit, now)
      if due and due <= now then
        if its_limit.ordered and first_behind(group) then return true end
        if free_from(its_limit, group, now, running_of, first_end_of) > now then return true end
      end
    end
    return false
  end

  -- Return whether the limits of groups hold back messages that are due, as far as the groups of the
  -- first ones tell. Paused groups may have many: then those tell that come due last, and those
  -- that have a turn soonest, which are not paused.
  local function holds_groups()
    if not some_grouped then return false end
    local function groups_of(due_ids)
      local groups = {}
      for _, place in ipairs(#due_ids > 0 and redis.call('HMGET', positions, unpack(due_ids)) or none) do
        if place then add_group(groups, group_of(place)) end
      end
      return groups
    end
    local due = redis.call('ZCOUNT', group_waiting, '-inf', now)
    if due == 0 then return false end
    if holds_one(groups_of(redis.call('ZRANGE', group_waiting, 0, math.min(due, 20) - 1))) then return true end
    if due <= 20 then return false end
    if holds_one(groups_of(redis.call('ZRANGE', group_waiting, math.max(20, due - 20), due - 1))) then return true end
    return holds_one(redis.call('ZRANGEBYSCORE', group_turns, '(' .. format_score(now), '+inf', 'LIMIT', 0, 20))
  end

  -- Return the longest period of the rates that have counted what was handed out; 0 if none has.
  local function longest_period()
    local longest = count > 0 and starts_of_queue and limit_of_queue.per or 0
    for _, line in ipairs(served) do
      if line.starts then longest = math.max(longest, line.limit.per) end
    end
    return longest
  end

  -- Let the queue itself wait for its slot, if its limit lets nothing run now but messages wait, and
  -- this claim got less than it wanted. Return the time until the next look, whether suspects may be
  -- handed out, whether messages are due, whether no client waits for the slot, and whether this one
  -- is the first that does.
  local function wait_for_slot(wait, has_suspects, wants_more)
    if not queue_limit then return wait, has_suspects, false, false, false end
    local moment = limit_of_queue and free_from(limit_of_queue, '', now, running_in_queue, first_end_in_queue) or now
    if moment > now and (has_suspects or wait >= 0 and wait < moment - now) then
      local is_first, waits = false, wants_more or redis.call('ZSCORE', group_turns, '')
      if waits then is_first = redis.call('ZADD', group_turns, format_score(moment), '') == 1 end
      return moment - now, false, has_suspects or wait == 0, not waits, is_first
    end
    redis.call('ZREM', group_turns, '')
    return wait, has_suspects, false, false, false
  end

  -- Look at what may be handed out, once nothing changes any more that waits.
  local function begin()
    local over = some_kept_slots and redis.call('ZRANGEBYSCORE', kept_slots, '-inf', now, 'LIMIT', 0, 100) or none
    if #over > 0 then
      check_messages()
      local _, _, _, _, free_slots = rare()
      free_slots(over, now)
    end
    local first_trial = some_grouped and some_used and tonumber(redis.call('ZRANGE', suspect_turns, 0, 0, 'WITHSCORES')[2]) or nil
    has_trials = first_trial ~= nil
    if not limit_of_queue then return has_trials and first_trial <= now end
    local room
    room, starts_of_queue = room_of(limit_of_queue, '', now, limit, running_in_queue)
    limit = math.max(0, math.min(limit, room))
    return has_trials and first_trial <= now
  end

  if turns_updated_to then settle_next() end
  return {
    line_up_lost = line_up_lost, begin = begin, hand_out_of = hand_out_of, find_suspect = find_suspect_of_group, take = take_turns, check = check_turns, take_out = take_out,
    leave = leave, note_left = note_left, settle_others = settle_others, wait_for_slot = wait_for_slot, holds_groups = holds_groups, longest_period = longest_period,
  }
