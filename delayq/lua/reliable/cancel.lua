-- cancel: delete messages. Workers that have one of them are told.
--
-- Keys:
--   messages    see include/queue.lua
--   wake        CHANNEL  where a new head is announced: its due time, microseconds
--   settings    HASH     see include/settings.lua; and CHANNEL of that name, where the cancellation
--                        of a message that a worker has is announced: "cancelled", the token of its
--                        lease, and its id; and its end: "finished", and its id
--   kept_slots  ZSET     names of cancelled messages that keep their slots, scored by the end of
--                        their leases, microseconds: see include/kept_slots.lua
--   batches     see include/batches.lua
-- Arguments:
--   with_leased  0 or 1  whether to delete messages that workers have
--   id...        text    of each message
-- Roles: producer, admin
-- Repeatable: no
--
-- Returns for each message: 1, or 0 if there is none of that id, it has expired, or a worker has it
-- and may keep it.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue
-- include: kept_slots
-- include: follow
-- include: batches
-- include: at_rest

-- A key of a foreign type must fail before the first write, and before any worker is told.
check_messages()
redis.call('ZSCORE', kept_slots, '')
check_batches()
local keep = redis.call('HGET', settings, 'keep')
local now = now_us()
local reply = {}
for i, id in ipairs(ids) do
  local message = find_message(id, now)
  local may_go = message and not message.expired and (with_leased == '1' or not message.leased)
  reply[i] = may_go and 1 or 0
  if may_go then
    -- A hint, which changes nothing if it is refused: a worker finds out when it renews the lease.
    local token = message.leased and (redis.call('HGET', tokens, id) or redis.call('ZSCORE', leased, id))
    if token then redis.pcall('PUBLISH', settings, 'cancelled ' .. token .. ' ' .. id) end
    if token then
      -- First a write that frees memory: then a full server accepts the rest.
      local ends = redis.call('ZSCORE', leased, id)
      redis.call('ZREM', leased, id)
      keep_slots(id, token, ends)
    end
    local members = members_among({id}, 'c')
    delete_message(id, message.where)
    end_members(members, now)
    if keep then redis.pcall('PUBLISH', settings, 'finished ' .. id) end
  end
end
return reply
