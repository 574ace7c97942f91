-- resume: let a paused queue hand out messages again, and wake its workers.
--
-- KEYS[1]  paused  STRING   exists while no client may take anything
-- KEYS[2]  wake    CHANNEL  where workers listen
--
-- Returns 1 when it was paused.
-- include: clock

local now = now_us()
local was = redis.call('DEL', KEYS[1])
-- A hint: the others look every few seconds as well.
redis.pcall('PUBLISH', KEYS[2], string.format('%.0f', now))
return was
