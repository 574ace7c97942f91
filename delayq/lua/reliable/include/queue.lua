-- queue: where messages wait, and what every script needs that finds them. Needs clock, leases,
-- groups and group_turns. See docs/redis-data-model.md.
--
-- Every script that finds messages has these keys first, in this order.
--
-- Keys:
--   waiting_0 to waiting_9  ZSETs  by priority: ids of messages that wait, scored by their due time,
--                                  microseconds
--   leases                  see include/leases.lua

-- Fail if one of the keys of messages is of a foreign type: call this before the first write. Calls
-- that are made often check only what they need.
local function check_messages()
  check_details()
  redis.call('HGET', bodies, '')
  for _, set in ipairs({leased, group_waiting, group_members, group_turns, suspect_turns, rate_log, waiting[0], unpack(waiting)}) do
    redis.call('ZSCORE', set, '')
  end
end

-- Return the names of the sets of messages that wait: the priorities, highest first, and 'grouped'
-- for all messages of groups; only 0 if no other is in use.
local function used_sets()
  -- An array begins at 1, so this leaves out priority 0.
  if redis.call('EXISTS', group_waiting, unpack(waiting)) == 0 then return {0} end
  -- So callers find this set by its name, as the others.
  waiting.grouped = group_waiting
  return {9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 'grouped'}
end

-- Make a message wait until it is due.
local function enqueue(id, priority, due, now)
  local set = waiting[priority]
  local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
  redis.call('ZADD', set, format_score(due), id)
  -- Tell the others only if they would wake too late otherwise.
  if not first[2] or first[1] == id or due < tonumber(first[2]) then announce(due, now) end
end

-- Write nothing, but demand the right to take ids out of sets and hashes later in this script. A full
-- server accepts everything after this.
local function demand_removal()
  redis.call('ZREM', leased, '\255')
  redis.call('HDEL', tokens, '\255')
end

local function parse_priority(text)
  local priority = number_or(0, text)
  return waiting[priority] and priority or 0
end

local function priority_of(id) return parse_priority(redis.call('HGET', priorities, id)) end

-- Return the name of the set and the due time of a message that waits; nil if it is in no set.
local function locate(id)
  local expected = priority_of(id)
  local score = redis.call('ZSCORE', waiting[expected], id)
  if score then return expected, tonumber(score) end
  for _, where in ipairs(used_sets()) do
    score = redis.call('ZSCORE', waiting[where], id)
    if score then return where, tonumber(score) end
  end
  return nil
end

-- Return {where, score, lost, leased, expired} of a message; nil if there is none. A lease that is
-- lost no longer counts, even if no claim has seen it since: then `lost` is true. If `expired` is
-- true, the message has expired and is not leased: to callers it is absent, but its id is still in
-- use until `free_id` or a claim frees it.
local function find_message(id, now)
  if redis.call('HEXISTS', bodies, id) == 0 then return nil end
  local message, ends = {}, tonumber(redis.call('ZSCORE', leased, id))
  if ends then
    message.where, message.score, message.lost, message.leased = 'leased', ends, ends >= 0 and ends <= now, ends > now
    waiting.leased = leased
  else
    message.where, message.score = locate(id)
    if not message.score then return nil end
  end
  message.expired = not message.leased and number_or(MAX_SCORE, redis.call('HGET', expiries, id)) < now
  return message
end

-- Count the messages that have expired and are not leased. All of them are due: see `return_message`.
local function count_expired(now) return redis.call('ZCOUNT', expiry_index, '-inf', '(' .. format_score(now)) end

-- Return the counts of a message's attempts, with that of a lost lease.
local function find_attempts(id, message)
  local attempt_counts = parse_attempts(redis.call('HGET', attempts, id))
  if message.lost then lose(attempt_counts, message.score) end
  return attempt_counts
end

-- Delete a message that is in the set of this name.
local function delete_message(id, where)
  waiting.leased = leased
  local waits_for_slot = where == 'leased' and awaits_slot()
  demand_removal()
  local groups = leave_groups({id})
  redis.call('ZREM', waiting[where], id)
  delete_details({id})
  local now = now_us()
  update_turns(groups, now)
  if waits_for_slot then free_slot(now) end
end

-- Make a message wait, whether it had a lease or waited before. `group` is that of a message that has
-- no position yet.
local function return_message(id, attempt_counts, due, now, group)
  local priority, position, expiry = priority_of(id), redis.call('HGET', positions, id), redis.call('HGET', expiries, id)
  -- A claim drops it as soon as it has expired: until it was due, it would hold its group up.
  local expires = number_or(nil, expiry or nil)
  if expires then due = math.min(due, math.max(now, expires + 1)) end
  group = position and group_of(position) or group
  -- A key of a foreign type must fail before the first write.
  redis.call('ZSCORE', waiting[priority], id)
  redis.call('HGET', errors, id)
  if expires then redis.call('ZSCORE', expiry_index, id) end
  if group then check_groups() end
  local waits_for_slot = awaits_slot()
  demand_removal()
  attempt_counts.due, attempt_counts.lost = due, 0
  save_attempts(id, attempt_counts)
  if expires then redis.call('ZADD', expiry_index, format_score(expires), id) end
  if group then
    enqueue_in_group(id, group, level_of(group, position, priority), due, position)
  else
    enqueue(id, priority, due, now)
  end
  -- Last, so that the message is in a set whatever is refused before.
  local was_leased = redis.call('ZREM', leased, id) == 1
  redis.call('HDEL', tokens, id)
  if group then update_turns({group}, now) end
  if was_leased and waits_for_slot then free_slot(now) end
end

-- Make a message wait as before its lease, which does not count as an attempt.
local function give_back(id, now)
  local attempt_counts = parse_attempts(redis.call('HGET', attempts, id))
  local due, priority = due_of(attempt_counts, redis.call('HGET', bodies, id)), priority_of(id)
  local position, expires = redis.call('HGET', positions, id), number_or(nil, redis.call('HGET', expiries, id) or nil)
  redis.call('ZSCORE', waiting[priority], id)
  if position then check_groups() end
  local waits_for_slot, was_suspect = awaits_slot(), is_suspect(attempt_counts)
  demand_removal()
  if expires then redis.call('ZADD', expiry_index, format_score(expires), id) end
  local group = position and group_of(position)
  if was_suspect then due = math.min(due, now) end
  if position then
    enqueue_in_group(id, group, was_suspect and '?' or level_of(group, position, priority), due, position)
  elseif was_suspect then
    redis.call('ZADD', leased, suspect_score(due), id)
    announce(0, now)
  else
    enqueue(id, priority, due, now)
  end
  -- Last, so that the message is in a set whatever is refused before.
  if position or not was_suspect then redis.call('ZREM', leased, id) end
  redis.call('HDEL', tokens, id)
  if position then update_turns({group}, now, was_suspect) end
  if waits_for_slot then free_slot(now) end
end

-- Free the id of an expired message: it gets another one. The next claim drops or buries it.
local function free_id(id, message, now)
  local other
  repeat
    other, now = id .. '\0' .. string.format('%016.0f', now), now + 1
  until redis.call('HEXISTS', bodies, other) == 0
  redis.call('ZREM', waiting[message.where], id)
  redis.call('ZADD', waiting[message.where], format_score(message.score), other)
  local absent_from = redis.call('ZSCORE', expiry_index, id)
  if absent_from then
    redis.call('ZREM', expiry_index, id)
    redis.call('ZADD', expiry_index, absent_from, other)
  end
  local position = redis.call('HGET', positions, id)
  if position then
    redis.call('ZREM', group_members, position .. id)
    redis.call('ZADD', group_members, 0, position .. other)
  end
  for _, hash in ipairs({bodies, sparse_hashes()}) do
    local value = redis.call('HGET', hash, id)
    if value then
      redis.call('HDEL', hash, id)
      redis.call('HSET', hash, other, value)
    end
  end
end

-- Return {state, priority, moment, attempt, body, error} of a message that `find_message` has found.
local function describe(message, now, attempt_counts, priority, body, error)
  local state = message.leased and 'leased' or message.score <= now and 'ready' or 'delayed'
  if message.lost then lose(attempt_counts, message.score) end
  local moment = message.score
  if not message.leased and (body or message.lost or is_suspect(attempt_counts)) then
    local _, asked = due_of(attempt_counts, body)
    moment = asked
  end
  moment = format_score(math.max(0, math.min(moment, MAX_SCORE)))
  return {state, priority, moment, attempt_counts.used + (message.leased and 1 or 0), body, error}
end

-- Return what `describe` tells of a message by its id, which `find_message` has found or not; false
-- if it is not alive.
local function describe_by_id(id, message, now)
  if not message or message.expired then return false end
  local attempt_counts = parse_attempts(redis.call('HGET', attempts, id))
  return describe(message, now, attempt_counts, priority_of(id), redis.call('HGET', bodies, id), redis.call('HGET', errors, id))
end
