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
-- next message is due or the next lease ends, suspects apart; 0 if one already is, -1 if there is
-- none, the queue is paused, or the claim was given up. listeners: the number of clients that got
-- the notice; 0 if there was none, -1 if the user may not publish it. token: of all these leases,
-- which is their end. position: of a message that has another priority than 0, or was handed out
-- before; due: empty if the body tells it. suspect: 1 if the message handed out is one, and thus
-- alone. more: 1 if suspects wait that were not handed out. The last ids are of recurring messages
-- that were dropped or died. An error, DELAYQ_SETTINGS, if other settings are stored.
-- include: clock
-- include: notice
-- include: leases
-- include: groups
-- include: queue
-- include: letters
-- include: settings

local last_number = number_or(0, string.match(redis.call('GET', call) or '', '^%d+'))
local layout, stored_epoch, queue_limit =
  unpack(redis.call('HMGET', settings, 'layout', 'epoch', 'share'))
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
if redis.call('EXISTS', paused, attempts, expiries, tokens, places, unpack(waiting)) > 0 then
  if redis.call('EXISTS', paused) == 1 then return nothing() end
  highest = redis.call('EXISTS', unpack(waiting)) > 0 and 9 or 0
  some_tried = redis.call('EXISTS', attempts) == 1
  some_expire = redis.call('EXISTS', expiries) == 1
  some_kept = redis.call('EXISTS', tokens) == 1
  some_grouped = redis.call('EXISTS', places) == 1
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

-- Return the suspect to hand out next: the one whose lease was lost first. If priorities are in
-- use, it has the highest among the first hundred.
local function find_suspect()
  local most, found = redis.call('EXISTS', priorities) == 1 and 100 or 10, nil
  local ids_and_ends = redis.call('ZRANGEBYSCORE', leased, '-inf', now, 'WITHSCORES', 'LIMIT', 0, most)
  for i = 1, #ids_and_ends, 2 do
    local id, priority = ids_and_ends[i], priority_of(ids_and_ends[i])
    if bytes_left > 0 and (not found or priority > found.priority) then
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

-- Messages of groups: those handed out, as members of `lines`, and the ids by group.
local left, has_left, served, changed = {}, false, {}, {}

-- Return the state of a group's line, of which messages may be taken.
local function open_line(group)
  local limit, is_paused = limit_of(group)
  local line = {group = group, base = group .. '\0', from = '[' .. group .. '\0!', limit = limit, room = math.huge, at = 1, members = none}
  line.is_ordered = limit and limit.ordered
  if limit then
    local running, first_end = running_of(group, now)
    line.room = room_of(limit, group, now, function() return running end, first_end)
  end
  if is_paused then line.room = 0 end
  -- Limits may have changed since it got its turn.
  changed[group] = true
  return line
end

-- Return the next due message of a line, as a member of `lines`; nil if none is left.
local function next_in(line, most)
  while line.from do
    local member = line.members[line.at]
    if not member then
      line.members = redis.call('ZRANGEBYLEX', lines, line.from, '(' .. line.base .. ':', 'LIMIT', 0, most)
      line.at, member = 1, line.members[1]
      if not member then return nil end
    end
    local level, due = level_and_moment(member)
    if due <= now then
      line.at, line.from = line.at + 1, '(' .. member
      return member, level
    end
    if level == '9' or level == '!' and line.is_ordered then return nil end
    line.members, line.from = none, '[' .. line.base .. string.char(string.byte(level) + 1)
  end
end

-- Hand out a message of a group, and return whether it was; it may be gone.
local function hand_out_of(line, member, priority, record, body)
  hand_out(id_in_line(member), priority, record, body)
  line.room, left[count], has_left = line.room - 1, member, true
  served[line.group] = served[line.group] or {limit = line.limit}
  served[line.group].last = count
  table.insert(served[line.group], ids[count])
end

-- Hand out the next message of a line, and return whether there was one.
local function take_in(line, most)
  while line.room > 0 and looks_left > 0 do
    local member, level = next_in(line, math.max(1, math.min(most, line.room)))
    if not member then return false end
    looks_left = looks_left - 1
    local id = id_in_line(member)
    local body, record = redis.call('HGET', bodies, id), some_tried and redis.call('HGET', attempts, id)
    record = record and parse_record(record) or new
    local priority = level == '!' and priority_of(id) or 9 - (tonumber(level) or 9)
    if not is_gone(id, priority, record, body, some_expire and redis.call('HGET', expiries, id)) then
      is_full = count > 0 and #body > bytes_left
      if is_full then return false end
      hand_out_of(line, member, priority, record, body)
      return true
    end
  end
  return false
end

-- Return the first suspect of a group, of those whose turn it is.
local function find_suspect_of_group()
  for _, group in ipairs(redis.call('ZRANGEBYSCORE', trials, '-inf', now, 'LIMIT', 0, 10)) do
    local line = open_line(group)
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

-- Groups take turns, and the messages without a group count as one more of them.
local function take_turns()
  local groups, sources, first_ungrouped = redis.call('ZRANGEBYSCORE', turns, '-inf', now, 'WITHSCORES', 'LIMIT', 0, limit + 1), {}, nil
  for priority = highest, 0, -1 do
    local due = tonumber(redis.call('ZRANGE', waiting[priority], 0, 0, 'WITHSCORES')[2])
    if due and due <= now then first_ungrouped = math.min(first_ungrouped or due, due) end
  end
  if first_ungrouped and #groups > 0 then
    first_ungrouped = math.max(first_ungrouped, number_or(0, redis.call('HGET', settings, 'turn')))
  end
  for i = 1, #groups, 2 do
    if first_ungrouped and first_ungrouped < tonumber(groups[i + 1]) then
      sources[#sources + 1], first_ungrouped = false, nil
    end
    if groups[i] ~= '' then sources[#sources + 1] = open_line(groups[i]) end
  end
  if first_ungrouped then sources[#sources + 1] = false end
  local last_ungrouped
  while #sources > 0 and count < limit and looks_left > 0 and not is_full do
    local still = {}
    local each = math.ceil((limit - count) / #sources)
    for _, line in ipairs(sources) do
      local took = false
      if count < limit and not is_full then
        if line then
          took = take_in(line, each)
        else
          took = take_ungrouped(#sources == 1 and limit or count + 1)
          if took then last_ungrouped = count end
        end
      end
      if took then still[#still + 1] = line end
    end
    sources = still
  end
  return #groups > 0 and last_ungrouped
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
      groups[group_of(place)] = true
    end
  end
  settle_all(groups, now)
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

local some_lost, some_trials = is_some_lost(), false
if some_grouped then
  if some_lost then
    line_up_lost()
    some_lost = is_some_lost()
  end
  some_trials = redis.call('ZCOUNT', trials, '-inf', now) > 0
end
local has_limit, limit_of_queue = queue_limit, parse_limit(queue_limit)
local function room_of_queue()
  local after = string.format('(%.0f', now)
  return room_of(limit_of_queue, '', now, function() return redis.call('ZCOUNT', leased, after, '+inf') end, function()
    return tonumber(redis.call('ZRANGEBYSCORE', leased, after, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2])
  end)
end
if limit_of_queue then limit = math.max(0, math.min(limit, (room_of_queue()))) end
local may_have_suspect = suspects == '1' and (some_lost or some_trials) and limit > 0
if may_have_suspect and held_id ~= '' then may_have_suspect = (lease_end(held_id, held_token) or 0) <= now end
local suspect = may_have_suspect and (some_lost and find_suspect() or some_trials and find_suspect_of_group()) or nil
local is_suspect, last_ungrouped = false, nil
if some_grouped and suspect then
  is_suspect = true
  if suspect.line then
    hand_out_of(suspect.line, suspect.member, suspect.priority, suspect.record, suspect.body)
  else
    hand_out(suspect.id, suspect.priority, suspect.record, suspect.body)
  end
elseif some_grouped then
  last_ungrouped = take_turns()
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
if some_grouped or has_limit then check_groups() end
-- First the writes that free memory: then a full server accepts the rest.
for priority, seen in pairs(passed) do
  if seen > 0 then redis.call('ZREMRANGEBYRANK', waiting[priority], 0, seen - 1) end
end
if some_grouped then
  for group in pairs(leave_lines(gone)) do changed[group] = true end
end
if #gone > 0 then
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
  if has_left then
    local members, grouped_ids, new_members, new_places = {}, {}, {}, {}
    for i, member in pairs(left) do
      local place = place_of(group_of(member), '~', tonumber(token))
      members[#members + 1], grouped_ids[#grouped_ids + 1] = member, ids[i]
      new_members[#new_members + 1], new_members[#new_members + 2] = 0, place .. ids[i]
      new_places[#new_places + 1], new_places[#new_places + 2] = ids[i], place
    end
    redis.call('ZREM', lines, unpack(members))
    redis.call('ZREM', grouped, unpack(grouped_ids))
    redis.call('ZADD', lines, unpack(new_members))
    redis.call('HSET', places, unpack(new_places))
  end
  if last_ungrouped then redis.call('HSET', settings, 'turn', format_score(now - (count - last_ungrouped) / 4)) end
  for group, those in pairs(served) do
    if those.limit and those.limit.rate then log_starts(group, those.limit, those, now) end
    changed[group] = nil
    settle(group, now, now - (count - those.last) / 4)
  end
  if limit_of_queue and limit_of_queue.rate then log_starts('', limit_of_queue, ids, now) end
  redis.call('SET', call, number .. ' ' .. token, 'PX', math.ceil(lease_us / 1000))
end

if some_grouped then settle_all(changed, now) end
local wait, has_suspects = -1, some_lost and redis.call('ZCOUNT', leased, '-inf', now) > 0
if some_grouped then
  has_suspects = has_suspects or redis.call('ZCOUNT', trials, '-inf', now) > 0
  for _, set in ipairs({turns, trials}) do
    -- The empty name is the queue itself; and suspects that may go out now count apart.
    local from = set == trials and '(' .. format_score(now) or '-inf'
    local names = redis.call('ZRANGEBYSCORE', set, from, '+inf', 'WITHSCORES', 'LIMIT', 0, 2)
    local at = names[1] == '' and 4 or 2
    if names[at] then wait = shorter_wait(wait, math.max(0, math.ceil(tonumber(names[at])) - now)) end
  end
end
for priority = highest, 0, -1 do wait = shorter_wait(wait, wait_us(waiting[priority], now, 1)) end
if has_limit then
  local room, moment = 1, now
  if limit_of_queue then room, moment = room_of_queue() end
  if room <= 0 and moment > now and (has_suspects or wait >= 0 and wait < moment - now) then
    wait, has_suspects = moment - now, false
    redis.call('ZADD', turns, format_score(moment), '')
  else
    redis.call('ZREM', turns, '')
  end
end
local next_end = redis.call('ZRANGEBYSCORE', leased, string.format('(%.0f', now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
if next_end then wait = shorter_wait(wait, math.min(tonumber(next_end), MAX_SCORE) - now) end
local listeners = count > 0 and give_notice(wake, now, has_suspects and 0 or wait, now, signature) or 0
return {
  now, wait, expired_count, died_count, listeners, token, ids, found_bodies, details, is_suspect and 1 or 0,
  has_suspects and 1 or 0, occurrences,
}
