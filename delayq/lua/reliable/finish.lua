-- finish: delete messages that have been handled, as ack does, and keep a record of each.
--
-- Keys:
--   leases      see include/leases.lua
--   wake        CHANNEL  where a free slot is announced, microseconds
--   remembered  ZSET     ids that count as taken, scored by the end of that time, microseconds
--   records     see include/records.lua
--   awaited     ZSET     ids whose end clients wait for, scored by the end of that, microseconds
-- Arguments:
--   runs        text  how many of the messages in a row have the same token, and the token of their
--                     leases: "99:token 1:token"
--   id...       text  of each message
--   offered...  text  when it was offered, from its body
--   again...    int   1 if attempts may be recorded of it already, 0 if not
--   attempt...  text  JSON on one line, about the attempt that has finished it
--   result...   text  "=" and the result, or nothing if there is none
-- Roles: consumer
-- Repeatable: no
--
-- Returns for each message: 1, or 0 if it is not leased under that token any more, and nothing was
-- changed.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: records

local now, ids = now_us(), {}
for at = FIRST, #ARGV, STRIDE do ids[#ids + 1] = ARGV[at + ID] end
local some_details = redis.call('EXISTS', sparse_hashes()) > 0
local ends = read_leases(ids, runs, some_details)
local keep_us, most = read_keep()
local remember_us = number_or(0, redis.call('HGET', settings, 'dedup_window'))
local some_await = redis.call('EXISTS', awaited) == 1
-- A key of a foreign type must fail before the first write.
check_records()
if some_details then check_details() end
if some_await then redis.call('ZSCORE', awaited, '') end
if remember_us > 0 then redis.call('ZSCORE', remembered, '') end
local reply, finished, new, seen = {}, {}, {}, {}
for i, id in ipairs(ids) do
  local is_ours = ends[i] and not seen[id]
  reply[i] = is_ours and 1 or 0
  if is_ours then
    seen[id], finished[#finished + 1] = true, id
    if keep_us > 0 then
      local at = FIRST + (i - 1) * STRIDE
      local offered, result, rows, count = ARGV[at + OFFERED], ARGV[at + RESULT], '', 0
      if ARGV[at + AGAIN] == '1' then rows, count = recorded_attempts(id, offered) end
      local state = result == '' and 'done' or 'result'
      new[#new + 1] = id
      new[#new + 1] = format_record(state, offered, rows, count, ARGV[at + ATTEMPT], string.sub(result, 2), now)
    end
  end
end
if #finished == 0 then return reply end
local waits_for_slot = awaits_slot()
-- First the writes that free memory: then a full server accepts the rest.
local groups = leave_groups(finished)
redis.call('ZREM', leased, unpack(finished))
delete_details(finished)
update_turns(waiting_for_slots(groups, now, redis.call('EXISTS', suspect_turns) == 1), now)
if waits_for_slot then free_slot(now) end
if remember_us > 0 then
  trim_remembered(now)
  remember(finished, now + remember_us, now)
end
if keep_us > 0 then save_records(new, keep_us, most, now) end
if some_await then
  for i, ends_us in ipairs(redis.call('ZMSCORE', awaited, unpack(finished))) do
    if ends_us then
      announce_finished(finished[i])
      redis.call('ZREM', awaited, finished[i])
    end
  end
end
return reply
