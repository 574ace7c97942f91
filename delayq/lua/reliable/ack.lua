-- ack: delete messages that have been handled.
--
-- Keys:
--   messages  see include/queue.lua
--   done      ZSET  ids of messages that were handled lately, scored by the end of the time for
--                   which they are remembered, microseconds
--   settings  HASH  see include/settings.lua
-- Arguments:
--   id...        text  of each message
--   token...     text  of its lease
--   priority...  int   of the message, 0 to 9
-- Roles: consumer
-- Repeatable: no
--
-- Returns for each message: 1, or 0 if it is not leased under that token any more, and nothing was
-- changed.
-- include: clock
-- include: queue

local ids, reply, acked, acked_by_priority = {}, {}, {}, {}
for at = FIRST, #ARGV, STRIDE do ids[#ids + 1] = ARGV[at + ID] end
local lease_texts = redis.call('HMGET', leases, unpack(ids))
local seen, at = {}, FIRST
for i, id in ipairs(ids) do
  local token, priority = ARGV[at + TOKEN], tonumber(ARGV[at + PRIORITY])
  at = at + STRIDE
  local is_ours = not seen[id] and has_token(lease_texts[i], token)
  reply[i] = is_ours and 1 or 0
  if is_ours then
    seen[id] = true
    acked[#acked + 1] = id
    local group = acked_by_priority[priority] or {}
    acked_by_priority[priority] = group
    group[#group + 1] = id
  end
end
local remember_us = number_or(0, redis.call('HGET', settings, 'dedup_window'))
for priority, group in pairs(acked_by_priority) do redis.call('ZREM', live[priority], unpack(group)) end
delete_details(acked)
if remember_us > 0 and #acked > 0 then
  local now = now_us()
  trim_done(now)
  for _, id in ipairs(acked) do redis.call('ZADD', done, format_score(now + remember_us), id) end
  -- The set disappears with the last of them, even if no client comes to trim it.
  local keep_ms = math.ceil(remember_us / 1000)
  if redis.call('PTTL', done) < keep_ms then redis.call('PEXPIRE', done, keep_ms) end
end
return reply
