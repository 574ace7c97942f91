-- seal_batch: note that all messages of a batch are stored, and how many these are.
--
-- Keys:
--   messages  see include/queue.lua
--   wake      CHANNEL  where a new head is announced: its due time, microseconds
--   settings  HASH     see include/settings.lua; and CHANNEL of that name, where the end of the batch
--                      is announced: "finished", and its id
--   batches   see include/batches.lua
-- Arguments:
--   batch    text    its id
--   is_last  0 or 1  whether no more messages leave the batch
--   id...    text    of each message that was not stored, because its id was taken: it leaves
-- Roles: producer
-- Repeatable: yes
-- Stores: yes
--
-- Returns 1, or 0 if there is no such batch.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue
-- include: follow
-- include: batches
-- include: at_rest

check_messages()
check_batches()
local created, total, ended = read_batch(batch)
if not created then return 0 end
for _, id in ipairs(ids) do redis.call('ZREM', batch_members, batch .. '\0o\0' .. id) end
if is_last == '1' and total == '?' then
  total = 0
  for _, state in ipairs({'o', 'h', 'd', 'c'}) do total = total + count_members(batch, state) end
  local now = now_us()
  save_batch(batch, created, total, 0, NEVER, now)
  end_batch(batch, false, now)
  forget_batches(now)
end
return 1
