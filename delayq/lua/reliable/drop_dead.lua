-- drop_dead: drop dead letters for good.
--
-- KEYS[1]  dead           ZSET  ids of dead letters, scored by when they died, microseconds
-- KEYS[2]  dead_messages  HASH  id to why, as JSON, newline, body
-- ARGV[...]  id  of each dead letter
--
-- Returns how many were dropped.

-- A right that consumers do not have: they make dead letters, and do not clean up.
redis.call('ZCOUNT', KEYS[1], '-inf', '+inf')
redis.call('HDEL', KEYS[2], unpack(ARGV))
return redis.call('ZREM', KEYS[1], unpack(ARGV))
