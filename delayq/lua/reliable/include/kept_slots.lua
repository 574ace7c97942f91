-- kept_slots: the slots of messages that were cancelled while workers had them. Needs groups,
-- group_turns, and the key kept_slots.
--
-- Such a message is gone at once, but its handler may go on for a while. Until it has ended, or its
-- lease would have, the message keeps its slots under a name of its own: the id, a NUL, and the token
-- of its lease.

local function name_of(id, token) return id .. '\0' .. token end

-- Keep the slots of a message that is about to be deleted, if they are limited.
local function keep_slots(id, token, ends)
  local position = redis.call('HGET', positions, id)
  local group = position and group_of(position)
  local its_limit = group and limits_of({group})[group]
  local of_queue = parse_limit(redis.call('HGET', settings, 'share'))
  local counts_in_group = its_limit and its_limit.concurrency
  if not counts_in_group and not (of_queue and of_queue.concurrency) then return end
  local name = name_of(id, token)
  redis.call('ZADD', kept_slots, ends, name)
  if counts_in_group then
    redis.call('ZADD', group_members, 0, position .. name)
    redis.call('HSET', positions, name, position)
  end
end

-- Free slots that were kept under these names.
local function free_slots(names, now)
  local waits_for_slot, groups = awaits_slot(), leave_groups(names)
  redis.call('ZREM', kept_slots, unpack(names))
  redis.call('HDEL', positions, unpack(names))
  update_turns(groups, now)
  if waits_for_slot then free_slot(now) end
end
