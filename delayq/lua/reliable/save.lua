-- save: store the checkpoint of a message that a worker has, in place of its last one.
--
-- Keys:
--   leases  see include/leases.lua
-- Arguments:
--   id          text  of the message
--   token       text  of its lease
--   checkpoint  text  a number, which rises with each save, and the rest
-- Roles: consumer
-- Repeatable: yes
--
-- Returns 1, or 0 if the lease is over, and nothing was changed.
-- include: clock
-- include: leases
-- include: checkpoint

local ends = lease_end(id, token)
if not ends or ends <= now_us() then return 0 end
-- A call that was repeated, because its connection was lost, may arrive again behind a later one.
local report, last = split_checkpoint(redis.call('HGET', checkpoints, id))
if number_or(-1, string.match(last, '^%d+')) >= tonumber(string.match(checkpoint, '^%d+')) then return 1 end
redis.call('HSET', checkpoints, id, with_progress(report, checkpoint))
return 1
