-- nack: make messages that were not handled due again after a delay: they failed, or are snoozed.
--
-- Keys:
--   messages  see include/queue.lua
--   wake      CHANNEL  where a new head is announced: its due time, microseconds
--   records   see include/records.lua
-- Arguments:
--   id...        text  of each message
--   token...     text  of its lease
--   delay_us...  int   time from now, microseconds
--   spent...     int   1 if the attempt counts, 0 if not
--   error...     text  of the handler, or empty
--   offered...   text  when it was offered, from its body
--   attempt...   text  JSON on one line, about this attempt; empty: nothing is recorded
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
-- include: records

-- A key of a foreign type must fail before the first write.
for at = FIRST, #ARGV, STRIDE do
  if ARGV[at + ATTEMPT] ~= '' then check_records() end
end
if COUNT > 1 then check_messages() end
local now = now_us()
local reply = {}
for at = FIRST, #ARGV, STRIDE do
  local id, last_error = ARGV[at + ID], ARGV[at + ERROR]
  local is_ours = lease_end(id, ARGV[at + TOKEN]) ~= nil
  reply[#reply + 1] = is_ours and 1 or 0
  if is_ours then
    local attempt_counts = parse_attempts(redis.call('HGET', attempts, id))
    attempt_counts.used = attempt_counts.used + tonumber(ARGV[at + SPENT])
    return_message(id, attempt_counts, now + tonumber(ARGV[at + DELAY_US]), now)
    if last_error ~= '' then redis.call('HSET', errors, id, last_error) end
    record_attempt(id, ARGV[at + OFFERED], ARGV[at + ATTEMPT], now)
  end
end
return reply
