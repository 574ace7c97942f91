-- recheck: find out when a client must look at each of these queues. The safety net under lost
-- announcements.
--
-- Keys:
--   key...  of each queue in turn. Delayed: ZSET of records by due time, ms; ZSET of leases by
--           their end, ms; LIST of payloads that are due; CHANNEL of its notices; CHANNEL of its
--           summons. Reliable: ZSET of ids by the end of their lease, its ten ZSETs of ids by due
--           time, microseconds, from priority 0 up; ZSETs of its groups by the moments at which
--           one of their messages, or suspects, may be handed out; ZSET of cancelled messages that
--           keep their slots, by the end of their leases; HASH of its schedules; HASH of its
--           settings; the same two CHANNELs
-- Arguments:
--   kind...  text  of each queue: "delayed" or "reliable"
-- Roles: consumer
-- Repeatable: yes
--
-- Returns {now_us, then for each queue: wait_us, late_us, listeners, dormant, ready, epoch}.
-- wait_us: the time until the next message is due, or lease or kept slot ends, also if the queue is
-- paused; 0 if one already is or has, or limits have changed, -1 if there is none. late_us: how long
-- ago that was.
-- listeners, dormant: the number of clients on this server that hear its notices, and summons; -1 if
-- the user may not know it. ready: the length of its ready list, or the number of its schedules.
-- epoch: that of its settings, 0 if it has none. A key of a foreign type counts as empty here: it
-- must not hide the other queues, and its own queue's next call reports it.
-- include: clock

local now, used, late = now_us(), 0, 0
local function wait_for_next_key(unit)
  used = used + 1
  local readable, wait, late_there = pcall(wait_us, keys[used], now, unit)
  if not readable then return -1 end
  late = math.max(late, late_there)
  return wait
end
local reply = {now}
for _, kind in ipairs(kinds) do
  local wait, ready, epoch = nil, 0, nil
  late = 0
  if kind == 'delayed' then
    wait = shorter_wait(wait_for_next_key(1000), wait_for_next_key(1000))
    used = used + 1
    ready = redis.pcall('LLEN', keys[used])
  else
    wait = shorter_wait(wait_for_next_key(1), wait_for_next_key(1))
    -- Most queues use only the first priority: one look tells.
    if redis.call('EXISTS', unpack(keys, used + 1, used + 12)) > 0 then
      -- The queue itself may have to wait: see include/groups.lua.
      local gate = redis.pcall('ZSCORE', keys[used + 10], '')
      for _ = 1, 12 do wait = shorter_wait(wait, wait_for_next_key(1)) end
      if wait >= 0 and type(gate) == 'string' then wait = math.max(wait, math.ceil(tonumber(gate)) - now) end
    else
      used = used + 12
    end
    used = used + 1
    ready = redis.pcall('HLEN', keys[used])
    used = used + 1
    epoch = redis.pcall('HGET', keys[used], 'epoch')
    -- Limits have changed: the next claim gives groups their turns by them.
    if type(redis.pcall('HGET', keys[used], 'turns_updated_to')) == 'string' then wait = 0 end
  end
  reply[#reply + 1] = wait
  reply[#reply + 1] = late
  used = used + 2
  local counted = redis.pcall('PUBSUB', 'NUMSUB', keys[used - 1], keys[used])
  reply[#reply + 1] = counted[2] or -1
  reply[#reply + 1] = counted[4] or -1
  reply[#reply + 1] = type(ready) == 'number' and ready or 0
  reply[#reply + 1] = type(epoch) == 'string' and epoch or '0'
end
return reply
