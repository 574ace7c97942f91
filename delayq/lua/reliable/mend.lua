-- mend: put messages back where they wait, after the server has evicted keys of this queue. What it
-- finds in place stays as it is.
--
-- Keys:
--   messages  see include/queue.lua
--   wake      CHANNEL  where a new head is announced: its due time, microseconds
--   settings  HASH     see include/groups.lua
-- Arguments:
--   cursor  text  where to go on among the bodies: 0 at first
-- Roles: admin, consumer
-- Repeatable: yes
--
-- Returns where to go on; 0 if all were looked at, or the queue is being moved.
-- include: clock
-- include: leases
-- include: groups
-- include: settle
-- include: queue

check_messages()
-- While the queue is moved, what lies here is not whole.
if string.find(redis.call('HGET', settings, 'partitions') or '', '?', 1, true) then return '0' end
local now, groups = now_us(), {}
local found = redis.call('HSCAN', bodies, cursor, 'COUNT', 100)

-- Put a message of a group back into its line, if it is not there.
local function line_up_again(id, group, body, ends)
  local place = redis.call('HGET', positions, id)
  local is_in_line = place and redis.call('ZSCORE', group_members, place .. id)
  local due = redis.call('ZSCORE', group_waiting, id)
  add_group(groups, group)
  if is_in_line and (ends or due) then return end
  if ends then return set_place(id, place_of(group, '~', ends), place) end
  due = tonumber(due or nil) or due_of(parse_record(redis.call('HGET', attempts, id)), body)
  line_up(id, group, level_of(group, place, priority_of(id)), due, place)
end

for i = 1, #found[2], 2 do
  local id, body = found[2][i], found[2][i + 1]
  local group, ends = group_in(body), tonumber(redis.call('ZSCORE', leased, id) or nil)
  local expires = number_or(nil, redis.call('HGET', expiries, id) or nil)
  if expires then redis.call('ZADD', expiry_index, 'NX', format_score(math.max(expires, ends or 0)), id) end
  if group then
    line_up_again(id, group, body, ends)
  elseif not ends and not locate(id) then
    local due = due_of(parse_record(redis.call('HGET', attempts, id)), body)
    enqueue(id, priority_of(id), due, now)
  end
end
-- Also the groups whose messages are in place may have lost their turns.
settle(groups, now, true)
return found[1]
