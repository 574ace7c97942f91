-- claim_turns: how a claim takes messages of groups, which take turns, and keeps to limits. Needs groups
-- and what claim.lua knows. This is the body of a function of claim.lua, and returns the functions
-- that claim.lua calls.

  -- A cursor reads the messages of one group in order: `cursors_by_group` has those that are open,
  -- `served` those of which messages were handed out. Of these messages: the ids, the members of
  -- `group_members`, and the cursors.
  local cursors_by_group, served, claimed_ids, claimed_members, claimed_cursors = {}, {}, {}, {}, {}
  -- The ids that cursors have read so far, and their bodies: nil if they do not fit.
  local read_ids, read_bodies = {}, {}
  local limit_of_queue, usage_of_queue = parse_limit(queue_limit), nil
  local has_suspect_turns, has_taken_turns, last_ungrouped = false, false, nil
  local now_text, usual_level, blocking_level = format_moment19(now), string.byte('9'), string.byte('!')

  -- Return the functions for rare work, which most claims do not even create.
  local function rare_work()
-- include: group_turns
-- include: kept_slots
    return {
      update_turns = update_turns, leave_groups = leave_groups, enqueue_in_group = enqueue_in_group, level_of = level_of,
      free_slots = free_slots, first_due = first_due,
    }
  end

  -- Return a cursor that has read nothing yet. All fields are named here, because a table that grows
  -- is copied again and again. `members` were read last, and `at` is the next of them. Those up to
  -- `due_to` are due and of the usual level; those up to `read_to` are in `read_ids`, `before`
  -- indices further on. `from` is where to read on; `capacity` how many more messages may run.
  local function new_cursor(group)
    local base = group .. '\0'
    return {
      group = group, base = base, from = '[' .. base .. '!', members = none, at = 1, due_to = 0, read_to = 0, before = 0,
      limit = false, capacity = false, usage = false, soonest = false, claimed = 0, last_claimed = false, position = false,
    }
  end

  -- Read the limits of these groups, and how many of their messages may run.
  local function open_cursors(cursors)
    local groups = {}
    for i, cursor in ipairs(cursors) do groups[i] = cursor.group end
    local limits, are_paused = limits_of(groups)
    for i, cursor in ipairs(cursors) do
      local group = groups[i]
      local its_limit = limits[group]
      cursors_by_group[group], cursor.capacity = cursor, math.huge
      if its_limit then
        cursor.limit, cursor.capacity, cursor.usage = its_limit, capacity_of(its_limit, group, now, allowed, running_of)
      end
      if are_paused[group] then cursor.capacity = 0 end
    end
  end

  local function is_ordered(cursor) return cursor.limit and cursor.limit.ordered end

  -- Open cursors to claim from their groups. A group that has just become ordered may still have a
  -- turn, although a message that was handed out before holds it up.
  local function open_to_take(cursors)
    open_cursors(cursors)
    for _, cursor in ipairs(turns_updated_to and cursors or none) do
      if is_ordered(cursor) and first_suspect_or_running(cursor.group) then cursor.capacity = 0 end
    end
  end

  -- Read the next members of a group, up to `most`. One more tells whether the group gets another
  -- turn.
  local function read_on(cursor, most)
    local base, wanted = cursor.base, math.max(1, math.min(most, cursor.capacity))
    local members = redis.call('ZRANGEBYLEX', group_members, cursor.from, '(' .. base .. ':', 'LIMIT', 0, wanted + 1)
    local size = #members
    cursor.members, cursor.at, cursor.due_to, cursor.read_to, cursor.from = members, 1, 0, 0, false
    if size > wanted then cursor.from = '(' .. members[size] end
    -- They are in order: if the last one is of the usual level and due, and the first one is of that
    -- level, then all are.
    local at = #base + 1
    local is_usual = size > 0 and string.byte(members[1], at) == usual_level and string.byte(members[size], at) == usual_level
    if is_usual and string.sub(members[size], at + 1, at + 19) <= now_text then cursor.due_to = size end
  end

  -- Return the next due message, as a member of `group_members`; nil if none is left: then `soonest`
  -- is when the next one comes due.
  local function next_in(cursor, most)
    while true do
      local at = cursor.at
      local member = cursor.members[at]
      if member then
        cursor.at = at + 1
        if at <= cursor.due_to then return member end
        local level, due = level_and_moment(member)
        -- It is also due if its moment cannot be read.
        if due <= now then return member end
        cursor.soonest = math.min(cursor.soonest or due, due)
        local is_end = level == '9' or level == '!' and is_ordered(cursor)
        cursor.from = not is_end and '[' .. cursor.base .. string.char(string.byte(level) + 1)
        cursor.members, cursor.at = none, 1
      elseif cursor.from then
        read_on(cursor, most)
      else
        return nil
      end
    end
  end

  -- Read the bodies of the messages that are about to be handed out, up to `most` of each group.
  local function read_ahead(cursors, most)
    local size = #read_ids
    local first = size + 1
    for _, cursor in ipairs(cursors) do
      if cursor.capacity > 0 and not cursor.members[cursor.at] then
        -- This reads members, and puts the first one back.
        if next_in(cursor, most) then cursor.at = cursor.at - 1 end
        local members, id_at = cursor.members, #cursor.base + 21
        cursor.before = size + 1 - cursor.at
        for at = cursor.at, math.min(#members, cursor.at + math.max(1, math.min(most, cursor.capacity)) - 1) do
          size = size + 1
          read_ids[size] = string.sub(members[at], id_at)
        end
        cursor.read_to = size - cursor.before
      end
    end
    if size <= first then return end
    -- If bodies are large, do not read those that would not leave anyway.
    local fitting = math.floor(remaining_bytes / math.max(1, redis.call('HSTRLEN', bodies, read_ids[first])))
    if fitting > 1 then
      local texts = redis.call('HMGET', bodies, unpack(read_ids, first, math.min(first + fitting - 1, size)))
      for i = 1, #texts do read_bodies[first + i - 1] = texts[i] end
    end
  end

  -- Hand out a message of a group.
  local function hand_out_of(cursor, id, member, priority, attempt_counts, body, expiry)
    hand_out(id, priority, attempt_counts, body, expiry)
    local number = #claimed_ids + 1
    claimed_ids[number], claimed_members[number], claimed_cursors[number] = id, member, cursor
    if not cursor.last_claimed then served[#served + 1] = cursor end
    cursor.capacity, cursor.claimed, cursor.last_claimed = cursor.capacity - 1, cursor.claimed + 1, count
  end

  -- Hand out the next message of a group, and return whether there was one.
  local function take_in(cursor, most)
    while cursor.capacity > 0 and remaining_reads > 0 do
      local member = next_in(cursor, most)
      if not member then return false end
      remaining_reads = remaining_reads - 1
      local at, id, body = cursor.at - 1, nil, nil
      if at <= cursor.read_to then id, body = read_ids[at + cursor.before], read_bodies[at + cursor.before] end
      id = id or string.sub(member, #cursor.base + 21)
      if body == nil then body = redis.call('HGET', bodies, id) end
      local text, priority = some_attempts and redis.call('HGET', attempts, id), 0
      local attempt_counts = text and parse_attempts(text) or new
      if at > cursor.due_to then
        local level = string.byte(member, #cursor.base + 1)
        priority = level == blocking_level and priority_of(id) or usual_level - level
      end
      local expiry = some_expire and redis.call('HGET', expiries, id)
      local is_plain = body and attempt_counts == new and not some_expire
      if is_plain or not is_gone(id, priority, attempt_counts, body, expiry) then
        is_full = count > 0 and #body > remaining_bytes
        if is_full then
          cursor.at = at
          return false
        end
        hand_out_of(cursor, id, member, priority, attempt_counts, body, expiry)
        return true
      end
    end
    return false
  end

  -- Return the first suspect of a group, of those whose turn it is.
  local function find_suspect_of_group()
    for _, group in ipairs(redis.call('ZRANGEBYSCORE', suspect_turns, '-inf', now, 'LIMIT', 0, 10)) do
      local cursor = new_cursor(group)
      open_cursors({cursor})
      local member = redis.call('ZRANGEBYLEX', group_members, '[' .. cursor.base .. '?', '(' .. cursor.base .. '@', 'LIMIT', 0, 1)[1]
      if member and cursor.capacity > 0 then
        local id = id_in_member(member)
        local body, attempt_counts = redis.call('HGET', bodies, id), parse_attempts(redis.call('HGET', attempts, id))
        local priority, expiry = priority_of(id), redis.call('HGET', expiries, id)
        if not is_gone(id, priority, attempt_counts, body, expiry) then
          return {id = id, priority = priority, attempt_counts = attempt_counts, body = body, expiry = expiry, cursor = cursor, member = member}
        end
      end
    end
  end

  -- Take messages that belong to no group, up to this number of messages in all.
  local function take_ungrouped(most)
    local before = count
    for priority = highest, 0, -1 do take_from(priority, most) end
    return count > before
  end

  -- Groups take turns, and the messages without a group count as one more of them.
  local function take_turns()
    has_taken_turns = true
    -- One of them may be the queue itself.
    local most = allowed + (queue_limit and 1 or 0)
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
      if groups[i] ~= '' then sources[#sources + 1] = new_cursor(groups[i]) end
    end
    if first_ungrouped then sources[#sources + 1] = false end
    while #sources > 0 and count < allowed and remaining_reads > 0 and not is_full do
      local next_sources, unopened, read_cursors = {}, {}, {}
      local share = math.ceil((allowed - count) / #sources)
      for i = 1, math.min(#sources, allowed - count) do
        local cursor = sources[i]
        if cursor then read_cursors[#read_cursors + 1] = cursor end
        if cursor and not cursor.capacity then unopened[#unopened + 1] = cursor end
      end
      if #unopened > 0 then open_to_take(unopened) end
      read_ahead(read_cursors, share)
      -- The only source takes all its turns at once.
      local is_only_source = #sources == 1
      for _, cursor in ipairs(sources) do
        local is_taken = false
        if cursor and not cursor.capacity and count < allowed and not is_full then open_to_take({cursor}) end
        repeat
          if count == allowed or is_full then
            is_taken = false
          elseif cursor then
            is_taken = take_in(cursor, share)
          else
            is_taken = take_ungrouped(is_only_source and allowed or count + 1)
            if is_taken then last_ungrouped = count end
          end
        until not is_taken or not is_only_source
        if is_taken then next_sources[#next_sources + 1] = cursor end
      end
      sources = next_sources
    end
    if #groups == 0 then last_ungrouped = nil end
  end

  -- Give the next groups their turns by limits that have changed since they got them.
  local function update_next_turns()
    check_messages()
    -- The first write frees memory: then a full server accepts the rest.
    redis.call('ZREM', group_turns, '')
    local groups = {}
    for _ = 1, 50 do
      local member = redis.call('ZRANGEBYLEX', group_members, '(' .. turns_updated_to, '+', 'LIMIT', 0, 1)[1]
      -- A member without a NUL is foreign.
      local group = member and string.match(member, '^(%Z+)%z')
      turns_updated_to = group and after_group(group, member) or member
      if group then groups[#groups + 1] = group end
      if not member then break end
    end
    -- They have waited longer than those that this claim serves, which go behind them. A moment that
    -- this announces may have passed, but a change of settings makes each client look anyway.
    rare_work().update_turns(groups, now - allowed)
    if turns_updated_to then redis.call('HSET', settings, 'turns_updated_to', turns_updated_to) else redis.call('HDEL', settings, 'turns_updated_to') end
  end

  -- Let messages of groups wait again whose leases are lost: {id, attempt_counts, ends, body, position} each.
  local function requeue_lost(lost)
    local work, groups = rare_work(), {}
    for _, message in ipairs(lost) do
      local id, attempt_counts, ends, body, position = unpack(message)
      local group = group_of(position)
      redis.call('ZREM', leased, id)
      if is_suspect(attempt_counts) then
        work.enqueue_in_group(id, group, '?', ends, position)
      else
        local level = work.level_of(group, position, priority_of(id))
        work.enqueue_in_group(id, group, level, due_of(attempt_counts, body), position)
      end
      add_group(groups, group)
    end
    -- They have waited longer than those that this claim serves, which go behind them.
    work.update_turns(groups, now - allowed, true)
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
    if #claimed_ids == 0 then return end
    redis.call('ZREM', group_waiting, unpack(claimed_ids))
    redis.call('ZREM', group_members, unpack(claimed_members))
  end

  -- Take messages that are gone out of their groups, whose turns change then.
  local function leave_gone()
    for _, group in ipairs(rare_work().leave_groups(gone)) do cursors_by_group[group] = cursors_by_group[group] or new_cursor(group) end
  end

  -- Count what was handed out as started, by the rates.
  local function log_starts()
    local added, longest = {}, 0
    local function log(group, its_limit, usage, started)
      local base, before, after = group .. '\0', usage.total, usage.total + started
      -- Those that count no more make room.
      if usage.first or usage.expired == usage.total and usage.last > 0 then
        redis.call('ZREMRANGEBYLEX', rate_log, '[' .. base, '(' .. base .. format_moment19(now - its_limit.per) .. '\255')
      end
      if usage.last >= now then
        -- The clock was set back. Starts in the future count as if they were made now, so that moments
        -- and numbers have the same order.
        local from, to = '[' .. base .. format_moment19(now), '(' .. base .. ':'
        local first = redis.call('ZRANGEBYLEX', rate_log, from, to, 'LIMIT', 0, 1)[1]
        before = tonumber(string.match(first or '', '^%S+ %S+ (%d+)', #base + 1)) or before
        redis.call('ZREMRANGEBYLEX', rate_log, from, to)
      end
      added[#added + 1] = 0
      added[#added + 1] = base .. format_moment19(now) .. ' ' .. its_limit.per .. ' ' .. before .. ' ' .. after .. ' ' .. usage.expired
      longest = math.max(longest, its_limit.per)
    end
    for _, cursor in ipairs(served) do
      if cursor.usage then log(cursor.group, cursor.limit, cursor.usage, cursor.claimed) end
    end
    if usage_of_queue then log('', limit_of_queue, usage_of_queue, count) end
    if #added == 0 then return end
    -- Other groups may never come again. If most of a few that chance picks count no more, more of
    -- those make room than have come since the last time.
    if now % 4 == 0 then
      local few = 4 + math.floor(#added / 8)
      local expired = expired_starts(redis.call('ZRANDMEMBER', rate_log, -few), now)
      if #expired > few / 2 then
        expired = expired_starts(redis.call('ZRANDMEMBER', rate_log, -4 * (#added + 2)), now)
        redis.call('ZREM', rate_log, '', unpack(expired))
      end
    end
    redis.call('ZADD', rate_log, unpack(added))
    local keep_ms = math.ceil(longest / 1000)
    if redis.call('PTTL', rate_log) < keep_ms then redis.call('PEXPIRE', rate_log, 2 * keep_ms) end
  end

  -- Return the next turn of a group of which messages were handed out.
  local function turn_after(cursor)
    -- Whatever has been handed out holds an ordered group up.
    if is_ordered(cursor) then return nil end
    local due = next_in(cursor, 1) and 0 or cursor.soonest
    if not due or cursor.capacity > 0 then return due end
    return math.max(due, free_from(cursor.limit, cursor.group, now, running_of, first_end_of))
  end

  -- Give what was handed out its new positions, and its groups their next turns.
  local function note_claimed(token)
    local moved, new_positions = {}, {}
    local shared_position = '~' .. format_moment19(tonumber(token))
    for i, id in ipairs(claimed_ids) do
      local cursor = claimed_cursors[i]
      local position = cursor.position or cursor.base .. shared_position
      cursor.position = position
      moved[2 * i - 1], moved[2 * i] = 0, position .. id
      new_positions[2 * i - 1], new_positions[2 * i] = id, position
    end
    if #claimed_ids > 0 then
      redis.call('ZADD', group_members, unpack(moved))
      redis.call('HSET', positions, unpack(new_positions))
    end
    log_starts()
    if last_ungrouped then redis.call('HSET', settings, 'ungrouped_turn', format_score(now - (count - last_ungrouped) / 4)) end
    if has_suspect_turns then
      local groups, served_at = {}, {}
      for i, cursor in ipairs(served) do groups[i], served_at[cursor.group] = cursor.group, now - (count - cursor.last_claimed) / 4 end
      rare_work().update_turns(groups, now, false, served_at)
      return
    end
    local next_turns, without_turn = {}, {}
    for _, cursor in ipairs(served) do
      local turn = turn_after(cursor)
      if turn then
        local at = #next_turns
        next_turns[at + 1], next_turns[at + 2] = format_score(math.max(turn, now - (count - cursor.last_claimed) / 4)), cursor.group
      else
        without_turn[#without_turn + 1] = cursor.group
      end
    end
    if #without_turn > 0 then redis.call('ZREM', group_turns, unpack(without_turn)) end
    if #next_turns > 0 then redis.call('ZADD', group_turns, unpack(next_turns)) end
  end

  -- Correct the turns of the others, whose limits may have changed since they got them. Return the
  -- time until the next turn, and whether suspects may be handed out.
  local function update_other_turns()
    local wait, has_suspects = -1, false
    if not some_grouped then return wait, has_suspects end
    local groups = {}
    for group, cursor in pairs(cursors_by_group) do
      if not cursor.last_claimed then groups[#groups + 1] = group end
    end
    if #groups > 0 then
      rare_work().update_turns(groups, now)
      has_suspect_turns = true
    end
    local soonest = redis.call('ZRANGEBYSCORE', group_turns, '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, 2)
    -- The empty name is the queue itself.
    local at = soonest[1] == '' and 4 or 2
    if soonest[at] then wait = math.max(0, math.ceil(tonumber(soonest[at])) - now) end
    if has_suspect_turns then
      has_suspects = redis.call('ZCOUNT', suspect_turns, '-inf', now) > 0
      local later = redis.call('ZRANGEBYSCORE', suspect_turns, '(' .. format_score(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
      if later then wait = shorter_wait(wait, math.max(0, math.ceil(tonumber(later)) - now)) end
    end
    return wait, has_suspects
  end

  -- Return whether the limit of one of these groups keeps back a message that is due. An ordered
  -- group has no turn while one of its messages runs.
  local function is_one_limited(groups)
    local first_due = rare_work().first_due
    local limits, are_paused = limits_of(groups)
    for _, group in ipairs(groups) do
      local its_limit = not are_paused[group] and limits[group]
      local due = its_limit and first_due(group, its_limit, now)
      if due and due <= now then
        if its_limit.ordered and first_suspect_or_running(group) then return true end
        if free_from(its_limit, group, now, running_of, first_end_of) > now then return true end
      end
    end
    return false
  end

  -- Return whether the limits of groups keep back messages that are due, as far as the groups of the
  -- first ones tell. Paused groups may have many: then those tell that come due last, and those
  -- that have a turn soonest, which are not paused.
  local function are_groups_limited()
    if not some_grouped then return false end
    local function groups_of(due_ids)
      local groups = {}
      for _, position in ipairs(#due_ids > 0 and redis.call('HMGET', positions, unpack(due_ids)) or none) do
        if position then add_group(groups, group_of(position)) end
      end
      return groups
    end
    local due = redis.call('ZCOUNT', group_waiting, '-inf', now)
    if due == 0 then return false end
    if is_one_limited(groups_of(redis.call('ZRANGE', group_waiting, 0, math.min(due, 20) - 1))) then return true end
    if due <= 20 then return false end
    if is_one_limited(groups_of(redis.call('ZRANGE', group_waiting, math.max(20, due - 20), due - 1))) then return true end
    return is_one_limited(redis.call('ZRANGEBYSCORE', group_turns, '(' .. format_score(now), '+inf', 'LIMIT', 0, 20))
  end

  -- Return the longest period of the rates that have counted what was handed out; 0 if none has.
  local function longest_period()
    local longest = count > 0 and usage_of_queue and limit_of_queue.per or 0
    for _, cursor in ipairs(served) do
      if cursor.usage then longest = math.max(longest, cursor.limit.per) end
    end
    return longest
  end

  -- Let the queue itself wait for its slot, if its limit lets nothing run now but messages wait, and
  -- this claim got less than it wanted. Return the time until the next claim, whether suspects may be
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

  -- Free slots that are kept no longer, and apply the limit of the queue. Return whether a suspect
  -- of a group has its turn. Call this when all lost leases have been dealt with.
  local function begin()
    local expired = some_kept_slots and redis.call('ZRANGEBYSCORE', kept_slots, '-inf', now, 'LIMIT', 0, 100) or none
    if #expired > 0 then
      check_messages()
      rare_work().free_slots(expired, now)
    end
    local first_suspect_turn = some_grouped and some_used and tonumber(redis.call('ZRANGE', suspect_turns, 0, 0, 'WITHSCORES')[2]) or nil
    has_suspect_turns = first_suspect_turn ~= nil
    if not limit_of_queue then return has_suspect_turns and first_suspect_turn <= now end
    local capacity
    capacity, usage_of_queue = capacity_of(limit_of_queue, '', now, allowed, running_in_queue)
    allowed = math.max(0, math.min(allowed, capacity))
    return has_suspect_turns and first_suspect_turn <= now
  end

  if turns_updated_to then update_next_turns() end
  return {
    requeue_lost = requeue_lost, begin = begin, hand_out_of = hand_out_of, find_suspect = find_suspect_of_group, take = take_turns, check = check_turns, take_out = take_out,
    leave_gone = leave_gone, note_claimed = note_claimed, update_other_turns = update_other_turns, wait_for_slot = wait_for_slot, are_groups_limited = are_groups_limited, longest_period = longest_period,
  }
