-- claim: hand due messages to a worker, under a lease.
--
-- Keys:
--   messages  see include/queue.lua
--   paused         STRING   exists while no client may take anything
--   dead           ZSET     names of dead letters, scored by their time of death, microseconds
--   dead_messages  HASH     name to the reason, as JSON, newline, body: see include/letters.lua
--   wake           CHANNEL  where other clients are told that they need not look
--   settings       HASH     see include/settings.lua
-- Arguments:
--   epoch         text    of the settings that the caller knows
--   limit         int     hand out at most this many
--   lease_us      int     how long the worker has them
--   token         text    names the lease: every call about a leased message needs it
--   max_attempts  int     a message that has used this many dies instead; 0: no limit
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
-- Undone by: release
--
-- Returns {now_us, wait_us, expired, died, listeners, {id, priority, attempt, due, body, ...},
-- suspect, more, {id, ...}}. wait_us: the time until the next message is due or the next lease
-- ends, suspects apart; 0 if one already is, -1 if there is none or the queue is paused. listeners:
-- the number of clients that got the notice; 0 if there was none, -1 if the user may not publish
-- it. attempt: a number, or with the number of those that are forgiven, "3-1". suspect: 1 if the
-- message handed out is one, and thus alone. more: 1 if suspects wait that were not handed out. The
-- last ids are of recurring messages that were dropped or died. An error, DELAYQ_SETTINGS, if other
-- settings are stored.
-- include: clock
-- include: notice
-- include: queue
-- include: letters
-- include: settings

local layout, stored_epoch, expired =
  unpack(redis.call('HMGET', settings, 'layout', 'epoch', 'expired'))
if not knows_settings(layout, stored_epoch, epoch) then return settings_changed() end
local now = now_us()
if redis.call('EXISTS', paused) == 1 then return {now, -1, 0, 0, 0, {}, 0, 0, {}} end
limit, lease_us, max_attempts = tonumber(limit), tonumber(lease_us), tonumber(max_attempts)
-- The bodies of one answer have to cross a network before the first message can be handled, so
-- those after the first are bounded.
local bytes_left = 262144
-- Messages that are gone make room for more, but not without end.
local looks_left = limit + 400

local may_have_suspect = suspects == '1'
if held_id ~= '' then
  local _, score = locate(held_id)
  may_have_suspect = not has_token(redis.call('HGET', leases, held_id), held_token) or not score or score <= now
end

-- The changes are collected: a script is refused before its first write, or does its work.
local reply, ids, handed_out, suspect, is_full = {}, {}, 0, 0, false
local new_scores, gone, deaths, occurrences = {}, {}, {}, {}
-- For the few messages that have attempts forgiven: their attempts.
local used_of, forgiven_of = {}, {}
local expired_count, died_count = 0, 0

-- Most messages have no earlier attempts and no expiry: then there is nothing to look up.
local none = {}
local some_tried = redis.call('EXISTS', attempts) == 1
local some_expire = redis.call('EXISTS', expiries) == 1
local some_leased = redis.call('EXISTS', leases) == 1
-- The ends of their leases lie a quarter of a microsecond apart, so that they keep their order.
-- Four of them share the digits before the point, because turning numbers into text costs most
-- here.
local ends, quarters, whole = now + lease_us, {[0] = '.00', '.25', '.50', '.75'}, nil

local function set_score(priority, score, id)
  local scores = new_scores[priority]
  if not scores then
    scores = {}
    new_scores[priority] = scores
  end
  scores[#scores + 1], scores[#scores + 2] = score, id
end

local function drop(priority, id, used, reason, body)
  gone[priority] = gone[priority] or {}
  table.insert(gone[priority], id)
  if string.find(id, '@%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d$') then occurrences[#occurrences + 1] = id end
  if reason then deaths[#deaths + 1] = {id, priority, used, reason, body} end
end

local function hand_out(priority, id, used, forgiven, was_due, body)
  local quarter, base = handed_out % 4, handed_out * 5
  if quarter == 0 then whole = string.format('%.0f', ends + handed_out / 4) end
  set_score(priority, whole .. quarters[quarter], id)
  handed_out = handed_out + 1
  ids[handed_out] = id
  reply[base + 1], reply[base + 2], reply[base + 3], reply[base + 4], reply[base + 5] = id, priority, used, was_due, body
  if forgiven > 0 then
    used_of[handed_out], forgiven_of[handed_out] = used, forgiven
    reply[base + 3] = format_attempts(used, forgiven)
  end
  limit, bytes_left = limit - 1, bytes_left - (handed_out > 1 and #body or 0)
end

-- Look at the due messages of one priority, or at its suspects, in order.
local function take_from(priority, suspects_only)
  local set = live[priority]
  -- Of suspects, one is enough.
  local offset, most, limit_before = 0, suspects_only and 5 or 200, nil
  while limit > 0 and looks_left > 0 and suspect == 0 and not is_full do
    -- If some were gone, more may be: then look at more than are wanted.
    local count, due = math.min(limit_before == limit and 200 or limit, looks_left, most), nil
    limit_before = limit
    if suspects_only then
      due = redis.call('ZRANGE', set, '(0', '-inf', 'BYSCORE', 'REV', 'LIMIT', offset, count, 'WITHSCORES')
    else
      due = redis.call('ZRANGEBYSCORE', set, 0, format_score(now), 'WITHSCORES', 'LIMIT', offset, count)
    end
    if #due == 0 then return end
    local found = #due / 2
    if found > 1 then
      -- If bodies are large, do not read those that would not leave anyway.
      local size = redis.call('HSTRLEN', bodies, due[1])
      if size * found > bytes_left then found = math.max(1, math.floor(bytes_left / size)) end
    end
    local found_ids = {}
    for i = 1, found do found_ids[i] = due[i * 2 - 1] end
    local found_bodies = redis.call('HMGET', bodies, unpack(found_ids))
    local found_leases = some_leased and redis.call('HMGET', leases, unpack(found_ids)) or none
    local found_attempts = some_tried and redis.call('HMGET', attempts, unpack(found_ids)) or none
    local found_expiries = some_expire and redis.call('HMGET', expiries, unpack(found_ids)) or none
    for i = 1, found do
      if limit == 0 then break end
      local id, body = found_ids[i], found_bodies[i]
      local lease = found_leases[i] and parse_lease(found_leases[i])
      local used, forgiven, was_due = 0, 0, due[i * 2]
      if lease then
        used, forgiven, was_due = lease.attempt, forgiven_if_lost(lease), format_score(lease.due)
      elseif found_attempts[i] then
        used, forgiven = parse_attempts(found_attempts[i])
      end
      if suspects_only and not lease then was_due = format_score(math.min(now, -tonumber(due[i * 2]))) end
      if not body then
        drop(priority, id)
      elseif found_expiries[i] and number_or(MAX_SCORE, found_expiries[i]) < now then
        drop(priority, id, used, expired == 'dead' and 'expired', body)
        expired_count = expired_count + 1
      elseif max_attempts > 0 and used - forgiven >= max_attempts then
        drop(priority, id, used, 'attempts', body)
        died_count = died_count + 1
      elseif lease and not suspects_only and (handed_out > 0 or not may_have_suspect) then
        set_score(priority, format_score(-lease.due), id)
      elseif suspects_only and lease and handed_out > 0 then
        return
      elseif handed_out > 0 and #body > bytes_left then
        is_full = true
        break
      else
        hand_out(priority, id, used + 1, forgiven, was_due, body)
        -- A score below 0 without a lease is a foreign writer's.
        if lease then
          suspect = 1
          break
        end
      end
    end
    looks_left, offset = looks_left - found, offset + found
  end
end

for _, priority in ipairs(used_priorities()) do
  if may_have_suspect and handed_out == 0 then take_from(priority, true) end
  take_from(priority, false)
end

if handed_out > 0 then
  -- First the write that frees memory: then a full server accepts the rest.
  redis.call('HDEL', attempts, unpack(some_tried and ids or {ids[1]}))
end
for priority, gone_ids in pairs(gone) do
  redis.call('ZREM', live[priority], unpack(gone_ids))
  -- Their errors are still needed below.
  for _, hash in ipairs({bodies, leases, attempts, expiries, priorities}) do redis.call('HDEL', hash, unpack(gone_ids)) end
end
for _, death in ipairs(deaths) do
  local id, priority, used, reason, body = unpack(death)
  local why = {reason = reason, attempt = used, priority = priority, error = redis.call('HGET', errors, id) or nil}
  add_letter(id, cjson.encode(why), body, now)
end
for _, gone_ids in pairs(gone) do redis.call('HDEL', errors, unpack(gone_ids)) end
for priority, scores in pairs(new_scores) do redis.call('ZADD', live[priority], unpack(scores)) end
if handed_out > 0 then
  local mark = suspect == 1 and 's' or (handed_out > 1 or company == '1') and 'c' or 'a'
  local plain = mark == 'a' and ':' .. token or ':' .. mark .. '0:' .. token
  local new_leases = {}
  for i, id in ipairs(ids) do
    local used, was_due, ending = reply[i * 5 - 2], reply[i * 5 - 1], plain
    if forgiven_of[i] then used, ending = used_of[i], ':' .. mark .. forgiven_of[i] .. ':' .. token end
    new_leases[i * 2 - 1], new_leases[i * 2] = id, (used == 1 and '1:' or used .. ':') .. was_due .. ending
  end
  redis.call('HSET', leases, unpack(new_leases))
end
local wait, has_suspects = wait_for_next(now)
local listeners = handed_out > 0 and give_notice(wake, now, has_suspects and 0 or wait, now, signature) or 0
return {now, wait, expired_count, died_count, listeners, reply, suspect, has_suspects and 1 or 0, occurrences}
