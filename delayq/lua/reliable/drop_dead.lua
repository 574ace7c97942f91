-- drop_dead: drop dead letters for good.
--
-- Keys:
--   dead           ZSET  names of dead letters, scored by their time of death, microseconds
--   dead_messages  HASH  name to the reason, as JSON, newline, body: see include/letters.lua
--   settings       HASH  see include/settings.lua
-- Arguments:
--   name...  text  of each dead letter
-- Roles: admin
-- Repeatable: yes
--
-- Returns 1.
-- include: letters
-- include: at_rest

-- This needs a right that consumers do not have: they make dead letters, but do not clean up.
redis.call('ZCARD', dead)
check_letters()
delete_letters(names)
return 1
