-- purge: drop the pending messages, the ready ones, or both. Leased ones stay.
--
-- Keys:
--   timeout  ZSET  records, scored by due time, ms
--   ordered  LIST  the same records in offer order
--   ready    LIST  payloads that are due
-- Arguments:
--   state  text  "delayed", "ready" or "all"
-- Roles: admin
-- Repeatable: yes
--
-- Returns the number of messages dropped.

-- Both are counted first, because a key of a foreign type must fail before anything is removed.
-- Besides, ZCARD needs a right that consumers do not have: they take messages, but do not drop
-- them.
local pending_count, ready_count = redis.call('ZCARD', timeout), redis.call('LLEN', ready)
-- One command in each case, which is refused as a whole or not at all.
if state == 'ready' then
  redis.call('UNLINK', ready)
  return ready_count
end
if state == 'delayed' then
  redis.call('UNLINK', timeout, ordered)
  return pending_count
end
redis.call('UNLINK', timeout, ordered, ready)
return pending_count + ready_count
