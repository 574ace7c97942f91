-- expire: let everything pending disappear after a while. The ready list stays.
--
-- Keys:
--   timeout  ZSET  records, scored by due time, ms
--   ordered  LIST  the same records in offer order
-- Arguments:
--   ttl_ms  int  time from now, ms
-- Roles: admin
-- Repeatable: yes
--
-- Returns 1 if there was something to expire.

-- This needs a right that consumers do not have: they take messages, but do not drop them.
redis.call('ZCARD', timeout)
return math.max(redis.call('PEXPIRE', timeout, ttl_ms), redis.call('PEXPIRE', ordered, ttl_ms))
