-- claim: hand due messages to a worker, under a lease.
--
-- Keys:
--   messages       see include/queue.lua
--   paused         STRING   exists while no client may take anything
--   dead           ZSET     names of dead letters, scored by their time of death, microseconds
--   dead_messages  HASH     name to the reason, as JSON, newline, body: see include/letters.lua
--   wake           CHANNEL  where other clients are told that they need not claim
--   settings       HASH     see include/settings.lua; and CHANNEL of that name, where the end of
--                           messages is announced: "finished", and the id
--   kept_slots     ZSET     names of cancelled messages that keep their slots, scored by the end of
--                           their leases, microseconds: see include/kept_slots.lua
--   batches        see include/batches.lua
--   call           STRING   number of this client's last claim, and the token of its leases
-- Arguments:
--   number             int     of this claim, higher than that of the client's last one
--   max_count          int     hand out at most this many
--   lease_us           int     how long the worker has them
--   max_attempts       int     a message that has used this many dies instead, unless its body has
--                              a limit of its own; 0: no limit
--   signature          text    of the caller. If all due messages were handed out, it is published
--                              behind the due time of the next one, and now; empty: it is not
--   may_bring_suspect  0 or 1  whether the client may get a suspect: not if it has one at work, or
--                              asks for one elsewhere
--   alone              0 or 1  whether the client has nothing at work, and makes no other claim
--   own_suspect_id     text    the suspect of this queue that the client has at work: if its lease
--                              is over, it may get another; or empty
--   own_suspect_token  text    of that lease
-- Roles: consumer
-- Repeatable: no
-- Undone by: release_call
--
-- Returns these values, in this order:
--   now_us         the server's time
--   wait_us        the time until the next message is due, or the next lease or kept slot ends,
--                  suspects apart; 0 if one already is or has, or groups still wait for turns by
--                  limits that have changed; -1 if there is none, the queue is paused, or the claim
--                  was given up
--   expired        how many messages were past their time to live
--   died           how many had used all their attempts
--   listeners      how many clients got the notice, or would have got it if anybody waited for a
--                  slot; 0 if there was none, -1 if the user may not know it
--   token          of all these leases, which is their end; empty if there are none
--   ids            of the messages handed out
--   bodies         of these messages
--   details        position, priority, attempt, uncounted, due and expiry of each message that has
--                  another priority than 0, or an expiry, or was handed out before. due: empty if
--                  the body tells it; expiry: empty if it has none
--   suspicion      1 if the message handed out is a suspect, and thus the only one; 2 if it is to
--                  stay the only one for a whole lease; or else 0
--   more_suspects  1 if suspects wait that were not handed out
--   dropped        ids of recurring messages that were dropped or died
--   is_limited     1 if limits keep back messages that are due, as far as the first groups tell.
--                  Then a free slot is announced, but only if some claim since the last
--                  announcement has got fewer messages than it asked for
--   period_us      the longest period of the rates that have counted what was handed out; 0 if none
--                  has
-- An error, DELAYQ_SETTINGS, if the settings have the layout of another release.
-- include: clock
-- include: notice
-- include: leases
-- include: queue
-- include: letters
-- include: settings

local last_number = number_or(0, string.match(redis.call('GET', call) or '', '^%d+'))
local layout, queue_limit, turns_updated_to, partitions =
  unpack(redis.call('HMGET', settings, 'layout', 'share', 'turns_updated_to', 'partitions'))
if (layout or LAYOUT) ~= LAYOUT then return settings_changed() end
local now = now_us()
local function nothing() return {now, -1, 0, 0, 0, '', {}, {}, {}, 0, 0, {}, 0, 0} end
if last_number >= tonumber(number) then return nothing() end
-- While the queue is moved, what lies here is not whole, even if somebody ends the pause.
if partitions and string.find(partitions, '?', 1, true) then return nothing() end
max_count, max_attempts = tonumber(max_count), tonumber(max_attempts)
-- The limit of the queue may allow less.
local allowed = max_count
-- The bodies of one reply have to cross a network before the first message can be handled, so
-- those after the first are bounded.
local remaining_bytes = 262144
-- Messages that are gone make room for more, but not without end.
local remaining_reads = max_count + 400

-- Most queues have only messages that were never tried, of one priority and without an expiry: then
-- there is nothing to look up.
local highest, some_attempts, some_expire, some_tokens, some_grouped = 0, false, false, false, false
local some_kept_slots = false
local used_keys = redis.call('EXISTS', paused, attempts, expiries, tokens, positions, suspect_turns, kept_slots, unpack(waiting))
if used_keys > 0 then some_grouped = redis.call('HLEN', positions) > 0 end
local some_used = used_keys > (some_grouped and 1 or 0)
if some_used then
  if redis.call('EXISTS', paused) == 1 then return nothing() end
  highest = redis.call('EXISTS', unpack(waiting)) > 0 and 9 or 0
  some_attempts = redis.call('EXISTS', attempts) == 1
  some_expire = redis.call('EXISTS', expiries) == 1
  some_tokens = redis.call('EXISTS', tokens) == 1
  some_kept_slots = redis.call('EXISTS', kept_slots) == 1
  -- A key of a foreign type must fail before the first write.
  if some_kept_slots then redis.call('ZSCORE', kept_slots, '') end
end

-- The changes are collected: a script is refused before its first write, or does its work.
local count, ids, claimed_bodies, details = 0, {}, {}, {}
local passed, gone, deaths, occurrences, lost_members = {}, {}, {}, {}, {}
local expired_count, died_count, is_full = 0, 0, false

-- Return the settings about messages that are gone: expired, keep_dead, max_dead, keep. Most claims
-- find none.
local read_fates
local function fates()
  read_fates = read_fates or redis.call('HMGET', settings, 'expired', 'keep_dead', 'max_dead', 'keep')
  return unpack(read_fates)
end

local new = {used = 0, uncounted = 0}
local function hand_out(id, priority, attempt_counts, body, expiry)
  if count > 0 then remaining_bytes = remaining_bytes - #body end
  count = count + 1
  ids[count], claimed_bodies[count] = id, body
  if attempt_counts ~= new or priority > 0 or expiry then
    local due = attempt_counts.due and format_score(attempt_counts.due) or ''
    for _, detail in ipairs({count, priority, attempt_counts.used + 1, attempt_counts.uncounted, due, number_or('', expiry)}) do details[#details + 1] = detail end
  end
end

-- Note that a message is gone, if it is: half of it is missing, it has expired, or all its attempts
-- are used.
local function is_gone(id, priority, attempt_counts, body, expiry)
  local reason, most = nil, max_attempts
  -- A message may have a limit of its own.
  if body and attempt_counts.used > 0 then most = tonumber(string.match(body, '^[%d+e]+x(%d+)')) or most end
  if body and number_or(MAX_SCORE, expiry) < now then
    expired_count, reason = expired_count + 1, fates() == 'dead' and 'expired'
  elseif body and most > 0 and attempt_counts.used - attempt_counts.uncounted >= most then
    died_count, reason = died_count + 1, 'attempts'
  elseif body then
    return false
  end
  gone[#gone + 1] = id
  if string.find(id, '@%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d$') then occurrences[#occurrences + 1] = id end
  if reason then
    local why = {reason = reason, attempt = attempt_counts.used, priority = priority, error = redis.call('HGET', errors, id) or nil}
    deaths[#deaths + 1] = {id, cjson.encode(why), body, redis.call('HGET', checkpoints, id)}
  end
  local batch = batch_in(body)
  if batch then lost_members[#lost_members + 1] = {id_of(id), reason and 'd' or 'c', batch} end
  return true
end

-- Return the suspect without a group to hand out next: the one whose lease was lost first. If
-- priorities are in use, it has the highest among the first hundred.
local function find_suspect()
  local most, first = redis.call('EXISTS', priorities) == 1 and 100 or 10, nil
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', leased, '-inf', '(0', 'LIMIT', 0, most)) do
    local priority = priority_of(id)
    if remaining_bytes > 0 and (not first or priority > first.priority) then
      local body, attempt_counts = redis.call('HGET', bodies, id), parse_attempts(redis.call('HGET', attempts, id))
      local expiry = redis.call('HGET', expiries, id)
      if is_gone(id, priority, attempt_counts, body, expiry) then
        remaining_bytes = remaining_bytes - #(body or '')
      else
        first = {id = id, priority = priority, attempt_counts = attempt_counts, body = body, expiry = expiry}
      end
    end
  end
  return first
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

-- Hand out the due messages of one priority, in order, up to this number of messages in all.
local none = {}
local function take_from(priority, most_in_all)
  local set, offset, wanted_before, is_last = waiting[priority], passed[priority] or 0, nil, false
  while count < most_in_all and remaining_reads > 0 and not is_full and not is_last do
    -- If some were gone, more may be: then read more than are wanted.
    local wanted = most_in_all - count
    local most = math.min(wanted_before == wanted and 200 or wanted, remaining_reads)
    local due_ids = redis.call('ZRANGEBYSCORE', set, '-inf', now, 'LIMIT', offset, most)
    wanted_before, is_last = wanted, #due_ids < most
    if #due_ids == 0 then return end
    if #due_ids > 1 then
      -- If bodies are large, do not read those that would not leave anyway.
      local fitting = math.max(1, math.floor(remaining_bytes / math.max(1, redis.call('HSTRLEN', bodies, due_ids[1]))))
      if #due_ids > fitting then due_ids, is_last = {unpack(due_ids, 1, fitting)}, false end
    end
    local due_bodies = redis.call('HMGET', bodies, unpack(due_ids))
    local is_first = count == 0 and offset == 0 and priority == 0
    local size = is_first and not some_attempts and not some_expire and size_of(due_bodies)
    if size and size <= remaining_bytes then
      -- Most messages are like that: they leave as they are.
      count, ids, claimed_bodies, offset, remaining_bytes = #due_ids, due_ids, due_bodies, #due_ids, remaining_bytes - size
      due_ids = none
    end
    local due_attempts = some_attempts and redis.call('HMGET', attempts, unpack(due_ids)) or none
    local due_expiries = some_expire and redis.call('HMGET', expiries, unpack(due_ids)) or none
    for i, id in ipairs(due_ids) do
      if count == most_in_all then break end
      local body, attempt_counts = due_bodies[i], due_attempts[i] and parse_attempts(due_attempts[i]) or new
      local is_plain = body and attempt_counts == new and not due_expiries[i]
      if is_plain or not is_gone(id, priority, attempt_counts, body, due_expiries[i]) then
        if count > 0 and #body > remaining_bytes then
          is_full = true
          break
        end
        hand_out(id, priority, attempt_counts, body, due_expiries[i])
      end
      offset = offset + 1
    end
    remaining_reads, passed[priority] = remaining_reads - #due_bodies, offset
  end
end

-- Return the end of leases that end about then, as text. An end names one claim. Two zeros at its end
-- are avoided, because servers may write such numbers in other ways.
local function new_token(ends)
  while ends % 100 == 0 or redis.call('ZCOUNT', leased, ends, ends) > 0 do ends = ends + 2 end
  return string.format('%.0f', ends)
end

-- Those that wait as suspects are the first ones, then come lost leases that no claim has seen.
local first_end = tonumber(redis.call('ZRANGE', leased, 0, 0, 'WITHSCORES')[2]) or MAX_SCORE
local some_suspects = first_end < 0
local some_lost = first_end <= now and (not some_suspects or redis.call('ZCOUNT', leased, 0, now) > 0)
local has_due_suspects, all_grouped = false, false
-- The work that groups or a limit add to a claim. Most queues have neither, and do not even create
-- these functions. They take what they need from one function, because the functions of a script
-- cost the more, the more variables of its own each of them uses.
local by_turns
if some_grouped or queue_limit or turns_updated_to or some_kept_slots then by_turns = (function()
-- include: groups
-- include: claim_turns
end)() end

-- Let messages wait again whose leases are lost: the first of them, for bodies may be large. Those
-- that become suspects wait apart, the others as before their leases.
local function requeue_lost()
  local ids_and_ends = redis.call('ZRANGEBYSCORE', leased, 0, now, 'WITHSCORES', 'LIMIT', 0, 100)
  local lost, size = {}, 0
  for i = 1, #ids_and_ends, 2 do
    local id = ids_and_ends[i]
    local body, attempt_counts = redis.call('HGET', bodies, id), parse_attempts(redis.call('HGET', attempts, id))
    local ends = tonumber(ids_and_ends[i + 1])
    lose(attempt_counts, ends)
    lost[#lost + 1] = {id, attempt_counts, ends, body, some_grouped and redis.call('HGET', positions, id)}
    size = size + #(body or '')
    if size > 262144 then break end
  end
  -- A key of a foreign type must fail before the first write.
  check_messages()
  check_letters()
  -- This tells whether the last write for each is permitted.
  redis.call('ZREM', leased, '\255')
  local lost_of_groups = {}
  for _, message in ipairs(lost) do
    local id, attempt_counts, ends, body, position = unpack(message)
    redis.call('HDEL', tokens, id)
    save_attempts(id, attempt_counts)
    if position then
      lost_of_groups[#lost_of_groups + 1] = message
    elseif is_suspect(attempt_counts) then
      redis.call('ZADD', leased, suspect_score(ends), id)
      some_suspects = true
    else
      redis.call('ZADD', waiting[priority_of(id)], format_score(due_of(attempt_counts, body)), id)
      redis.call('ZREM', leased, id)
    end
  end
  if #lost_of_groups > 0 then by_turns.requeue_lost(lost_of_groups) end
  some_attempts, some_used, some_lost = true, true, redis.call('ZCOUNT', leased, 0, now) > 0
  highest = redis.call('EXISTS', unpack(waiting)) > 0 and 9 or 0
end
if some_lost then requeue_lost() end
if by_turns then has_due_suspects = by_turns.begin() end

local may_bring = may_bring_suspect == '1' and (some_suspects or has_due_suspects) and allowed > 0
if may_bring and own_suspect_id ~= '' then may_bring = (lease_end(own_suspect_id, own_suspect_token) or 0) <= now end
local suspect = may_bring and (some_suspects and find_suspect() or has_due_suspects and by_turns.find_suspect()) or nil
local has_suspect = false
if some_grouped and suspect then
  has_suspect = true
  if suspect.cursor then
    by_turns.hand_out_of(suspect.cursor, suspect.id, suspect.member, suspect.priority, suspect.attempt_counts, suspect.body, suspect.expiry)
  else
    hand_out(suspect.id, suspect.priority, suspect.attempt_counts, suspect.body, suspect.expiry)
  end
elseif some_grouped then
  by_turns.take()
end
for priority = some_grouped and -1 or highest, 0, -1 do
  if suspect and count == 0 and suspect.priority >= priority then
    has_suspect = true
    hand_out(suspect.id, suspect.priority, suspect.attempt_counts, suspect.body, suspect.expiry)
    break
  end
  take_from(priority, allowed)
end

-- Return whether what is handed out is alone in the client, if that makes a difference.
local function is_blamed_alone()
  if alone ~= '1' or count ~= 1 then return false end
  local most = tonumber(string.match(claimed_bodies[1], '^[%d+e]+x(%d+)')) or max_attempts
  return has_suspect or most == 1 or most == 2
end

-- A key of a foreign type must fail before the first write.
if some_tokens then redis.call('HGET', tokens, '') end
if some_expire then redis.call('ZSCORE', expiry_index, '') end
if #gone > 0 then
  check_details()
  fates()
end
-- Few claims find messages of batches that are gone, and the others do not even create these functions.
local end_lost_members
if #lost_members > 0 then end_lost_members = (function()
-- include: groups
-- include: group_turns
-- include: queue
-- include: follow
-- include: batches
  check_messages()
  check_batches()
  return function() end_members(lost_members, now) end
end)() end
if #deaths > 0 then check_letters() end
if by_turns then by_turns.check() end
-- First, writes that change nothing and take no memory: after them, a full server refuses nothing
-- more, and a user who may not take messages out of sets is refused here. Messages are taken out
-- last: so none is lost if a right has been taken away meanwhile.
if some_grouped then redis.call('ZREM', group_waiting, '\255') end
if count > 0 or #gone > 0 then redis.call('ZREMRANGEBYRANK', waiting[0], 1, 0) end
if #gone > 0 then
  redis.call('ZREM', leased, '\255')
  redis.call('HDEL', bodies, '\255')
end
for _, death in ipairs(deaths) do add_letter(death[1], death[2], death[3], now, death[4]) end
local token = ''
if count > 0 then
  token = new_token(end_of_lease(now, lease_us, is_blamed_alone()))
  -- The last one first, because their ends are equal: so a small set finds at once where to insert
  -- each.
  local new_ends = {}
  for i = 1, count do new_ends[i * 2 - 1], new_ends[i * 2] = token, ids[count + 1 - i] end
  if some_tokens then redis.call('HDEL', tokens, unpack(ids)) end
  redis.call('ZADD', leased, unpack(new_ends))
end
if by_turns then by_turns.take_out() end
for priority, seen in pairs(passed) do
  if seen > 0 then redis.call('ZREMRANGEBYRANK', waiting[priority], 0, seen - 1) end
end
if #gone > 0 then
  if some_grouped then by_turns.leave_gone() end
  redis.call('ZREM', leased, unpack(gone))
  delete_details(gone)
  local _, keep_dead, max_dead, keep = fates()
  if #deaths > 0 then trim_letters(number_or(0, keep_dead), number_or(0, max_dead), now) end
  -- A hint for the clients that wait for the end of one of them: they poll as well.
  for _, id in ipairs(keep and gone or {}) do redis.pcall('PUBLISH', settings, 'finished ' .. id) end
end
if count > 0 then
  if some_expire then
    local ids_and_ends = {}
    for i = 1, count do ids_and_ends[2 * i - 1], ids_and_ends[2 * i] = ids[i], token end
    expire_after(ids_and_ends)
  end
  if by_turns then by_turns.note_claimed(token) end
  -- If this is refused, the messages stay with a caller that gets no reply until their leases end.
  local start = by_turns and by_turns.longest_period() > 0 and string.format(' %.0f', now) or ''
  redis.pcall('SET', call, number .. ' ' .. token .. start, 'PX', math.ceil(lease_us / 1000))
end
-- Only now, because what follows from a batch may change the turns of groups.
if end_lost_members then end_lost_members() end

local wait, has_suspects = -1, some_suspects and redis.call('ZCOUNT', leased, '-inf', '(0') > 0
if by_turns then
  local has_some
  wait, has_some = by_turns.update_other_turns()
  has_suspects = has_suspects or has_some
end
if not all_grouped then
  for priority = highest, 0, -1 do
    -- One of a foreign type counts as empty, because the messages are handed out by now.
    local readable, wait_there = pcall(wait_us, waiting[priority], now, 1)
    if readable then wait = shorter_wait(wait, wait_there) end
  end
end
local is_limited, period, nobody_waits, is_first = false, 0, false, false
if by_turns then
  is_limited, period = wait ~= 0 and by_turns.are_groups_limited(), by_turns.longest_period()
  local is_queue_limited
  wait, has_suspects, is_queue_limited, nobody_waits, is_first = by_turns.wait_for_slot(wait, has_suspects, count < max_count)
  is_limited = is_limited or is_queue_limited
end
-- The next claim goes on with them.
if turns_updated_to or some_lost then wait = 0 end
local next_end = redis.call('ZRANGEBYSCORE', leased, string.format('(%.0f', now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
if next_end then wait = shorter_wait(wait, math.min(tonumber(next_end), MAX_SCORE) - now) end
-- The slots of cancelled messages hold groups up as leases do.
if some_kept_slots then wait = shorter_wait(wait, (wait_us(kept_slots, now, 1))) end
local listeners = 0
if nobody_waits then
  -- A notice would spare nobody a call, and cost as many deliveries as clients listen.
  local subscribers = signature ~= '' and redis.pcall('PUBSUB', 'NUMSUB', wake) or {wake, 0}
  listeners = subscribers[2] or -1
elseif count > 0 or is_first then
  -- The others need not find out one by one that the limit lets nothing run.
  listeners = give_notice(wake, now, has_suspects and 0 or wait, now, signature)
end
return {
  now, wait, expired_count, died_count, listeners, token, ids, claimed_bodies, details, has_suspect and (suspect.attempt_counts.lost > 2 and 2 or 1) or 0,
  has_suspects and 1 or 0, occurrences, is_limited and 1 or 0, period,
}
