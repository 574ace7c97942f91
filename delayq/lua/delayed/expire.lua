-- expire: let everything pending disappear after a while. The ready list stays.
--
-- KEYS[1]  timeout  ZSET  records, scored by due time, ms
-- KEYS[2]  ordered  LIST  the same records in offer order
-- ARGV[1]  ttl_ms   int   how long from now, ms
--
-- Returns 1 when there was something to expire.

-- This needs a right that consumers do not have: they take messages, but do not drop them.
redis.call('ZCARD', KEYS[1])
return math.max(redis.call('PEXPIRE', KEYS[1], ARGV[1]), redis.call('PEXPIRE', KEYS[2], ARGV[1]))
