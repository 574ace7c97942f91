-- bury_waiting: turn messages that no worker has into dead letters.
--
-- Keys:
--   messages       see include/queue.lua
--   wake           CHANNEL  where a new head is announced: its due time, microseconds
--   dead           ZSET     names of dead letters, scored by their time of death, microseconds
--   dead_messages  HASH     name to the reason, as JSON, newline, body: see include/letters.lua
--   settings       HASH     see include/settings.lua; and CHANNEL of that name, where the end of a
--                           message is announced: "finished", and its id
--   batches        see include/batches.lua
-- Arguments:
--   reason  text  why
--   id...   text  of each message
-- Roles: admin
-- Repeatable: no
--
-- Returns for each message: the name of its dead letter, or nothing if there is no message of that
-- id, it has expired, or a worker has it.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue
-- include: letters
-- include: follow
-- include: batches
-- include: at_rest

-- A key of a foreign type must fail before the first write.
check_messages()
check_letters()
check_batches()
local keep, keep_dead, max_dead = unpack(redis.call('HMGET', settings, 'keep', 'keep_dead', 'max_dead'))
local now = now_us()
local reply, has_buried = {}, false
for i, id in ipairs(ids) do
  local message = find_message(id, now)
  local may_go = message and not message.leased and not message.expired
  reply[i] = false
  if may_go then
    local body = redis.call('HGET', bodies, id)
    local attempt, last = find_attempts(id, message).used, redis.call('HGET', errors, id)
    local due = message.score > now and format_score(message.score) or nil
    local why = {reason = reason, attempt = attempt, priority = priority_of(id), error = last or nil, due = due}
    demand_removal()
    reply[i] = add_letter(id, cjson.encode(why), body, now, redis.call('HGET', checkpoints, id))
    delete_message(id, message.where)
    end_members(members_of({id}, {body}, 'd'), now)
    -- A hint for the clients that wait for it: they poll as well.
    if keep then redis.pcall('PUBLISH', settings, 'finished ' .. id) end
    has_buried = true
  end
end
if has_buried and (keep_dead or max_dead) then trim_letters(number_or(0, keep_dead), number_or(0, max_dead), now) end
return reply
