-- join_batch: let messages that are about to be offered join a batch, and create it if it is new.
--
-- Keys:
--   messages    see include/queue.lua
--   remembered  ZSET  ids that count as taken, scored by the end of that time, microseconds
--   settings    HASH  see include/settings.lua
--   batches     see include/batches.lua
-- Arguments:
--   partitions  int   the number of partitions by which the caller has placed the messages
--   batch       text  its id
--   on_success  text  the message that follows when all were handled, or nothing: see
--                     include/follow.lua
--   on_failure  text  the message that follows when the first one is lost to the batch, or nothing
--   id...       text  of each message
-- Roles: producer
-- Repeatable: yes
-- Stores: yes
--
-- Returns the ids of messages to follow that are taken, unless these are to be ignored: then nothing was
-- written. An error, DELAYQ_SETTINGS, if the queue has another number of partitions, or is about to get
-- one.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue
-- include: settings
-- include: follow
-- include: batches

local layout, stored_number = unpack(redis.call('HMGET', settings, 'layout', 'partitions'))
if not agrees_on(partitions, layout, stored_number) then return settings_changed() end
-- A move has found no unfinished batch, and would not see this one.
if redis.call('HEXISTS', settings, 'draining') == 1 then return settings_changed() end
check_batches()
local now = now_us()
local created, total = read_batch(batch)
-- A call that arrives late finds the batch whole, and changes nothing.
if created and total ~= '?' then return {} end
if not created then
  local taken = {}
  for _, follower in ipairs(parse_followers(on_success .. on_failure)) do
    local id = follower.id
    local message = find_message(id, now)
    local is_taken = message and not message.expired or number_or(0, redis.call('ZSCORE', remembered, id)) > now
    if is_taken and follower.on_duplicate ~= 'ignore' then taken[#taken + 1] = id end
  end
  if #taken > 0 then return taken end
  save_batch(batch, string.format('%.0f', now), '?', 0, now + MEMORY_OF_OTHERS, now)
  if on_success ~= '' then redis.call('HSET', batches, batch .. '\0then', on_success) end
  if on_failure ~= '' then redis.call('HSET', batches, batch .. '\0failure', on_failure) end
end
local new = {}
for _, id in ipairs(ids) do
  -- A call that arrives late must not open again what has ended.
  local is_member = false
  for _, state in ipairs({'o', 'h', 'd', 'c'}) do
    is_member = is_member or redis.call('ZSCORE', batch_members, batch .. '\0' .. state .. '\0' .. id)
  end
  if not is_member then new[#new + 1], new[#new + 2] = 0, batch .. '\0o\0' .. id end
end
if #new > 0 then redis.call('ZADD', batch_members, unpack(new)) end
forget_batches(now)
return {}
