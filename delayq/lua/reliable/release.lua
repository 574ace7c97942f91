-- release: return messages that were handed out and not touched. They wait again as before, and no
-- attempt is counted.
--
-- Keys:
--   messages  see include/queue.lua
--   wake  CHANNEL  where a new head is announced: its due time, microseconds
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

local now = now_us()
local reply = {}
for at = FIRST, #ARGV, STRIDE do
  local id, token, priority = ARGV[at + ID], ARGV[at + TOKEN], tonumber(ARGV[at + PRIORITY])
  local lease_text = redis.call('HGET', leases, id)
  local is_ours = has_token(lease_text, token)
  reply[#reply + 1] = is_ours and 1 or 0
  if is_ours then
    local lease = parse_lease(lease_text) or {attempt = 1, forgiven = 0, due = now}
    redis.call('HDEL', leases, id)
    if lease.mark == 's' then
      local before = {lease.attempt - 1, format_score(lease.due), 'l' .. lease.forgiven, ''}
      redis.call('HSET', leases, id, table.concat(before, ':'))
      enqueue_suspect(id, priority, lease.due, now)
    else
      if lease.attempt > 1 then redis.call('HSET', attempts, id, format_attempts(lease.attempt - 1, lease.forgiven)) end
      enqueue(id, priority, lease.due, now)
    end
  end
end
return reply
