-- watch: look at a message and its end, and ask to be notified of its progress and its end.
--
-- Keys:
--   messages       see include/queue.lua
--   records        see include/records.lua
--   dead           ZSET  names of dead letters, scored by their time of death, microseconds
--   dead_messages  HASH  name to the reason, as JSON, newline, body: see include/letters.lua
--   awaited        ZSET  ids whose end clients wait for, scored by the end of that, microseconds
-- Arguments:
--   id      text  of the message
--   for_us  int   how long the client waits before it asks again, and a while longer, microseconds
-- Roles: producer, admin
-- Repeatable: yes
--
-- Returns {now, keep, live, record, moment, letter, died, ends, state, due, attempt, offered, report}. The
-- first eight: see include/outcome.lua. The others are false unless the message is alive: its state, when
-- it is or was due, the number of its attempt, when it was offered, and the last report of its handler,
-- or nothing: see include/checkpoint.lua.
-- include: clock
-- include: leases
-- include: queue
-- include: records
-- include: outcome
-- include: checkpoint
-- include: await
-- include: at_rest

local now = now_us()
local reply, message = find_outcome(id, now)
local live = describe_by_id(id, message, now)
for i = 9, 13 do reply[i] = false end
if live then
  local report = split_checkpoint(redis.call('HGET', checkpoints, id))
  reply[9], reply[10], reply[11] = live[1], live[3], live[4]
  reply[12], reply[13] = string.match(live[5], '^%d+') or '0', report
  -- Last, because a key of a foreign type must fail before the first write.
  await_end(id, tonumber(for_us), now)
end
return reply
