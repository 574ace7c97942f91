-- trim_dead: drop dead letters that are too old or too many, a bounded number of them.
--
-- Keys:
--   dead           ZSET  names of dead letters, scored by their time of death, microseconds
--   dead_messages  HASH  name to the reason, as JSON, newline, body: see include/letters.lua
--   settings       HASH  see include/settings.lua
-- Roles: admin
-- Repeatable: yes
--
-- Returns how many were dropped.
-- include: clock
-- include: leases
-- include: letters
-- include: at_rest

-- Consumers do this as they make letters; by itself, it needs the right to clean up.
redis.call('ZCARD', dead)
check_letters()
local keep_dead, max_dead = unpack(redis.call('HMGET', settings, 'keep_dead', 'max_dead'))
return trim_letters(number_or(0, keep_dead), number_or(0, max_dead), now_us())
