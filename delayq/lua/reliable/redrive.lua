-- redrive: give dead letters another life, with all their attempts.
--
-- Keys:
--   messages       see include/queue.lua
--   wake           CHANNEL  where a new head is announced: its due time, microseconds
--   settings       HASH     see include/settings.lua
--   dead           ZSET     names of dead letters, scored by their time of death, microseconds
--   dead_messages  HASH     name to the reason, as JSON, newline, body: see include/letters.lua
--   batches        see include/batches.lua
-- Arguments:
--   keep_due  0 or 1  1: messages that were buried before they were due are due as they would have
--                     been; all others, and with 0 all of them, are due now
--   name...   text    of each dead letter
-- Roles: admin
-- Repeatable: yes
--
-- Returns for each letter: 1 it lives again, 0 there is none of that name, -1 a live message has
-- the id, -2 it cannot be read, and it stays, -3 there was only its name, which is gone.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue
-- include: letters
-- include: follow
-- include: batches
-- include: at_rest

-- This needs a right that consumers do not have: they make dead letters, but do not clean up.
redis.call('ZCARD', dead)
check_messages()
check_batches()
-- A move has found no unfinished batch, and would not see that one of them goes on.
if redis.call('HEXISTS', settings, 'draining') == 1 then
  return redis.error_reply('DELAYQ_SETTINGS the queue is about to be moved to another number of partitions: try again later')
end
local now = now_us()
local reply = {}
for i, name in ipairs(names) do
  local letter = redis.call('HGET', dead_messages, name)
  local why, checkpoint, body = parse_letter(letter or '')
  body = string.match(body, '^%d[^\n]*\n.*$')
  local id = id_of(name)
  local message = body and find_message(id, now)
  if message and message.expired then
    free_id(id, message, now)
    message = nil
  end
  reply[i] = not letter and 0 or not body and -2 or message and -1 or 1
  if reply[i] == 0 and redis.call('ZREM', dead, name) == 1 then reply[i] = -3 end
  if reply[i] == 1 then
    local readable, facts = pcall(cjson.decode, why)
    facts = readable and type(facts) == 'table' and facts or {}
    local priority, due = parse_priority(facts.priority), keep_due == '1' and number_or(0, facts.due) or 0
    -- A write that takes no memory lets a full server accept the rest. The letter goes last: whatever
    -- is refused before, it can be tried again.
    redis.call('HDEL', dead_messages, '\255')
    redis.call('HSET', bodies, id, body)
    if priority > 0 then redis.call('HSET', priorities, id, priority) end
    if checkpoint ~= '' then redis.call('HSET', checkpoints, id, checkpoint) end
    reopen_member(id, body, now)
    return_message(id, {used = 0, uncounted = 0}, math.max(due, now - (#names - i) / 4), now, group_in(body))
    delete_letters({name})
  end
end
return reply
