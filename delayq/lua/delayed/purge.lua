-- purge: drop the pending messages, the ready ones, or both. Leased ones stay.
--
-- KEYS[1]  timeout  ZSET  records, scored by due time, ms
-- KEYS[2]  ordered  LIST  the same records in offer order
-- KEYS[3]  ready    LIST  payloads that are due
-- ARGV[1]  state    text  "delayed", "ready" or "all"
--
-- Returns how many there were.

-- Both are counted first, because a key of a foreign type must fail before anything is removed. Besides, ZCARD needs a right that
-- consumers do not have: they take messages, but do not drop them.
local pending, ready = redis.call('ZCARD', KEYS[1]), redis.call('LLEN', KEYS[3])
-- One command in each case, which is refused as a whole or not at all.
if ARGV[1] == 'ready' then
  redis.call('UNLINK', KEYS[3])
  return ready
end
if ARGV[1] == 'delayed' then
  redis.call('UNLINK', KEYS[1], KEYS[2])
  return pending
end
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3])
return pending + ready
