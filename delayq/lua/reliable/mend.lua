-- mend: put messages back where they wait, after the server has evicted keys of this queue. Messages
-- that are in place stay as they are.
--
-- Keys:
--   messages  see include/queue.lua
--   wake      CHANNEL  where a new head is announced: its due time, microseconds
--   settings  HASH     see include/settings.lua
-- Arguments:
--   cursor  text  where to go on among the bodies: 0 at first
-- Roles: admin, consumer
-- Repeatable: yes
--
-- Returns where to go on; 0 if all were looked at, or the queue is being moved.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue

check_messages()
-- While the queue is moved, what lies here is not whole.
if string.find(redis.call('HGET', settings, 'partitions') or '', '?', 1, true) then return '0' end
local now, groups = now_us(), {}
local scan = redis.call('HSCAN', bodies, cursor, 'COUNT', 100)

-- Put a message of a group back among its members, if it is not there.
local function restore_position(id, group, body, ends)
  local position = redis.call('HGET', positions, id)
  local is_in_group = position and redis.call('ZSCORE', group_members, position .. id)
  local due = redis.call('ZSCORE', group_waiting, id)
  add_group(groups, group)
  if is_in_group and (ends or due) then return end
  if ends then return set_position(id, position_of(group, '~', ends), position) end
  due = tonumber(due or nil) or due_of(parse_attempts(redis.call('HGET', attempts, id)), body)
  enqueue_in_group(id, group, level_of(group, position, priority_of(id)), due, position)
end

for i = 1, #scan[2], 2 do
  local id, body = scan[2][i], scan[2][i + 1]
  local group, ends = group_in(body), tonumber(redis.call('ZSCORE', leased, id) or nil)
  local expires = number_or(nil, redis.call('HGET', expiries, id) or nil)
  if expires then redis.call('ZADD', expiry_index, 'NX', format_score(math.max(expires, ends or 0)), id) end
  if group then
    restore_position(id, group, body, ends)
  elseif not ends and not locate(id) then
    local due = due_of(parse_attempts(redis.call('HGET', attempts, id)), body)
    enqueue(id, priority_of(id), due, now)
  end
end
-- Groups whose messages are all there may still have lost their turns.
update_turns(groups, now, true)
return scan[1]
