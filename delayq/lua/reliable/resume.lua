-- resume: let a paused queue hand out messages again, and wake its workers.
--
-- Keys:
--   paused    STRING   exists while no client may take anything
--   wake      CHANNEL  where workers listen
--   settings  HASH     see include/settings.lua
-- Roles: admin
-- Repeatable: yes
--
-- Returns 1 if it was paused.
-- include: clock
-- include: at_rest

local now = now_us()
local was_paused = redis.call('DEL', paused)
-- A hint: the others poll every few seconds as well.
redis.pcall('PUBLISH', wake, string.format('%.0f', now))
return was_paused
