-- nack: make messages that were not handled due again after a delay.
--
-- Keys:
--   messages  see include/queue.lua
--   wake  CHANNEL  where a new head is announced: its due time, microseconds
-- Arguments:
--   id...        text  of each message
--   token...     text  of its lease
--   priority...  int   of the message, 0 to 9
--   delay_us...  int   time from now, microseconds
--   error...     text  of the handler, or empty
-- Roles: consumer
-- Repeatable: no
--
-- Returns for each message: 1, or 0 if it is not leased under that token any more, and nothing was
-- changed.
-- include: clock
-- include: queue

local now = now_us()
local reply = {}
for at = FIRST, #ARGV, STRIDE do
  local id, token, last_error = ARGV[at + ID], ARGV[at + TOKEN], ARGV[at + ERROR]
  local lease_text = redis.call('HGET', leases, id)
  local is_ours = has_token(lease_text, token)
  reply[#reply + 1] = is_ours and 1 or 0
  if is_ours then
    local lease = parse_lease(lease_text) or {attempt = 1, forgiven = 0}
    redis.call('HDEL', leases, id)
    redis.call('HSET', attempts, id, format_attempts(lease.attempt, lease.forgiven))
    if last_error ~= '' then redis.call('HSET', errors, id, last_error) end
    enqueue(id, tonumber(ARGV[at + PRIORITY]), now + tonumber(ARGV[at + DELAY_US]), now)
  end
end
return reply
