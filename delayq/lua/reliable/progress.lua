-- progress: note how far the handler of a message is, and tell clients that follow it.
--
-- Keys:
--   leases    see include/leases.lua
--   awaited   ZSET     ids whose ends clients wait for, scored by the end of that, microseconds
--   settings  CHANNEL  of include/settings.lua, where those who follow the message are told:
--                      "progress", and its id
-- Arguments:
--   id      text  of the message
--   token   text  of its lease
--   report  text  JSON: how far it is
-- Roles: consumer
-- Repeatable: yes
--
-- Returns 1, or 0 if the lease is over, and nothing was changed.
-- include: clock
-- include: leases
-- include: checkpoint

local ends, now = lease_end(id, token), now_us()
if not ends or ends <= now then return 0 end
local is_followed = redis.call('ZSCORE', awaited, id)
local _, checkpoint = split_checkpoint(redis.call('HGET', checkpoints, id))
redis.call('HSET', checkpoints, id, with_progress(string.format('%.0f ', now) .. report, checkpoint))
if is_followed then redis.pcall('PUBLISH', settings, 'progress ' .. id) end
return 1
