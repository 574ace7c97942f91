-- purge: drop what is pending, what is ready, or both. What is leased stays.
--
-- KEYS[1]  timeout  ZSET  records, scored by due time, ms
-- KEYS[2]  ordered  LIST  the same records in offer order
-- KEYS[3]  ready    LIST  payloads that are due
-- ARGV[1]  state    text  "delayed", "ready" or "all"
--
-- Returns how many there were.

-- Both are counted first: a key of a foreign type must fail before anything is removed. And ZCARD is a right that consumers do not
-- have: they take messages, and do not drop them.
local pending, ready = redis.call('ZCARD', KEYS[1]), redis.call('LLEN', KEYS[3])
-- One command each way: it is refused as a whole, or not at all.
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
