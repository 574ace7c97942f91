-- vacate: drop a partition's copy of the settings if nothing is in the partition, but for an epoch.
-- Then nothing can be stored there until it gets a newer copy.
--
-- Keys:
--   vacancy   see include/vacancy.lua
--   settings  HASH  see include/settings.lua
-- Arguments:
--   epoch  text  of the settings, which a copy has to exceed
-- Roles: admin
-- Repeatable: yes
--
-- Returns 1 if nothing is there; 0 otherwise, and nothing was changed.
-- include: clock
-- include: leases
-- include: vacancy

if not is_vacant(now_us()) then return 0 end
-- Whether the user may set an end is tried before the first write; a deletion is not.
redis.call('PEXPIRE', settings, 0)
redis.call('HSET', settings, 'epoch', epoch)
return 1
