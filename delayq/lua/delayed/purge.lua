-- purge: drop what is pending, what is ready, or both. What is leased stays.
--
-- KEYS[1]  timeout  ZSET  records, scored by due time, ms
-- KEYS[2]  ordered  LIST  the same records in offer order
-- KEYS[3]  ready    LIST  payloads that are due
-- ARGV[1]  state    text  "delayed", "ready" or "all"
--
-- Returns how many there were.

-- Both are counted first: a key of a foreign type must fail before anything is removed.
local pending, ready = redis.call('ZCARD', KEYS[1]), redis.call('LLEN', KEYS[3])
local dropped = 0
if ARGV[1] ~= 'ready' then
  dropped = dropped + pending
  redis.call('UNLINK', KEYS[1], KEYS[2])
end
if ARGV[1] ~= 'delayed' then
  dropped = dropped + ready
  redis.call('UNLINK', KEYS[3])
end
return dropped
