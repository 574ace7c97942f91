-- announce: tell the other clients that a message is due now.
--
-- Keys:
--   wake  CHANNEL  where they listen
-- Roles: consumer
-- Repeatable: yes
--
-- Returns nothing.
-- include: clock

-- A hint: the others look every few seconds as well.
redis.pcall('PUBLISH', wake, string.format('%.0f', now_us()))
