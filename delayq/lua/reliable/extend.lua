-- extend: make leases end later, or earlier.
--
-- Keys:
--   messages  see include/queue.lua
--   wake  CHANNEL  where a lease that ends earlier is announced: its end, microseconds
-- Arguments:
--   lease_us     int   time from now, microseconds
--   id...        text  of each message
--   token...     text  of its lease
--   priority...  int   of the message, 0 to 9
-- Roles: consumer
-- Repeatable: yes
--
-- Returns {now_us, 1 or 0 for each message}: 0 if it is not leased under that token any more, and
-- nothing was changed.
-- include: clock
-- include: queue

local now = now_us()
local ids, reply, extended, extended_by_priority = {}, {now}, {}, {}
for at = FIRST, #ARGV, STRIDE do ids[#ids + 1] = ARGV[at + ID] end
local lease_texts = redis.call('HMGET', leases, unpack(ids))
local moment = now + tonumber(lease_us)
local ends, is_earlier, at = format_score(moment), false, FIRST
for i, id in ipairs(ids) do
  local token, priority = ARGV[at + TOKEN], tonumber(ARGV[at + PRIORITY])
  at = at + STRIDE
  local is_ours = has_token(lease_texts[i], token)
  reply[i + 1] = is_ours and 1 or 0
  if is_ours then
    extended[#extended + 1] = id
    local group = extended_by_priority[priority] or {}
    group[#group + 1], group[#group + 2] = ends, id
    extended_by_priority[priority] = group
    -- Leases are renewed many at a time, and end later. A lease that is to end earlier than before
    -- comes alone.
    if #ids == 1 then is_earlier = moment < tonumber(redis.call('ZSCORE', live[priority], id) or 0) end
  end
end
-- There is nothing to delete. But a full server lets a script make a write that frees memory, and
-- then accepts all the rest.
if #extended > 0 then redis.call('HDEL', attempts, unpack(extended)) end
for priority, group in pairs(extended_by_priority) do
  local set = live[priority]
  redis.call('ZADD', set, 'XX', unpack(group))
  -- The others would wake too late otherwise.
  if is_earlier and head_of(set) == extended[1] then announce(moment, now) end
end
return reply
