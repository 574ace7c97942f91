-- bury: turn messages into dead letters.
--
-- Keys:
--   messages       see include/queue.lua
--   wake           CHANNEL  where a free slot, and a new head, is announced: its due time, microseconds
--   dead           ZSET     names of dead letters, scored by their time of death, microseconds
--   dead_messages  HASH     name to the reason, as JSON, newline, body: see include/letters.lua
--   records        see include/records.lua
--   batches        see include/batches.lua
-- Arguments:
--   id...     text  of each message
--   token...  text  of its lease
--   why...    text  JSON on one line; if it ends in an empty error, the last one that is known
--                   takes its place
--   offered...  text  when it was offered, from its body
--   attempt...  text  JSON on one line, about this attempt; empty: nothing is recorded
-- Roles: consumer
-- Repeatable: no
--
-- Returns for each message: 1, or 0 if it is not leased under that token any more, and nothing was
-- changed.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue
-- include: letters
-- include: records
-- include: follow
-- include: batches

check_messages()
check_letters()
check_batches()
for at = FIRST, #ARGV, STRIDE do
  if ARGV[at + ATTEMPT] ~= '' then check_records() end
end
local keep_dead, max_dead = unpack(redis.call('HMGET', settings, 'keep_dead', 'max_dead'))
check_groups()
local waits_for_slot = awaits_slot()
local now = now_us()
local reply, has_buried = {}, false
for at = FIRST, #ARGV, STRIDE do
  local id, why = ARGV[at + ID], ARGV[at + WHY]
  local is_ours = lease_end(id, ARGV[at + TOKEN]) ~= nil
  reply[#reply + 1] = is_ours and 1 or 0
  if is_ours then
    local body, last = redis.call('HGET', bodies, id), redis.call('HGET', errors, id)
    if last and string.sub(why, -11) == '"error":""}' then why = string.sub(why, 1, -4) .. cjson.encode(last) .. '}' end
    -- These tell what is permitted, and let a full server accept the rest.
    redis.call('ZREM', leased, '\255')
    redis.call('HDEL', bodies, '\255')
    add_letter(id, why, body or '', now, redis.call('HGET', checkpoints, id))
    end_members(members_of({id}, {body}, 'd'), now)
    local groups = leave_groups({id})
    redis.call('ZREM', leased, id)
    delete_details({id})
    if ARGV[at + ATTEMPT] ~= '' then
      record_attempt(id, ARGV[at + OFFERED], ARGV[at + ATTEMPT], now)
      announce_finished(id)
    end
    update_turns(groups, now)
    if waits_for_slot then free_slot(now) end
    waits_for_slot, has_buried = false, true
  end
end
if has_buried and (keep_dead or max_dead) then trim_letters(number_or(0, keep_dead), number_or(0, max_dead), now) end
return reply
