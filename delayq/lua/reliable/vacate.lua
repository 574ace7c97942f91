-- vacate: drop a partition's copy of the settings if nothing is in the partition. Then nothing can
-- be stored there until it gets a copy again.
--
-- Keys:
--   vacancy   see include/vacancy.lua
--   settings  HASH  see include/settings.lua
-- Roles: admin
-- Repeatable: yes
--
-- Returns 1 if nothing is there; 0 otherwise, and nothing was changed.
-- include: clock
-- include: leases
-- include: vacancy

if not is_vacant(now_us()) then return 0 end
redis.call('DEL', settings)
return 1
