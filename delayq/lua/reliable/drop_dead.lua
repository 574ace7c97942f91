-- drop_dead: drop dead letters for good.
--
-- KEYS[1]  dead           ZSET  names of dead letters, scored by when they died, microseconds
-- KEYS[2]  dead_messages  HASH  name to why, as JSON, newline, body: see include/letters.lua
-- ARGV[...]  name  of each dead letter
--
-- Returns 1.
-- include: letters

-- This needs a right that consumers do not have: they make dead letters, but do not clean up.
redis.call('ZCARD', KEYS[1])
discard(KEYS[1], KEYS[2], ARGV)
return 1
