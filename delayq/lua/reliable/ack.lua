-- ack: delete messages that have been handled.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  done  ZSET  ids of messages that were handled lately, scored by how long they are remembered, microseconds
-- ARGV[1]  remember_us  int  how long their ids count as duplicates from now on; 0: not at all
-- ARGV[...]  id, token, priority  for each message
--
-- Returns 1 or 0 for each: 0 when the lease is not ours any more, and nothing was changed.
-- include: clock
-- include: queue

local ids, reply, acked, by_set = {}, {}, {}, {}
for i = 2, #ARGV, 3 do ids[#ids + 1] = ARGV[i] end
local leases = redis.call('HMGET', KEYS[12], unpack(ids))
local seen = {}
for i, id in ipairs(ids) do
  local mine = not seen[id] and holds(leases[i], ARGV[i * 3])
  reply[i] = mine and 1 or 0
  if mine then
    seen[id] = true
    acked[#acked + 1] = id
    local at = tonumber(ARGV[i * 3 + 1]) + 1
    by_set[at] = by_set[at] or {}
    table.insert(by_set[at], id)
  end
end
for at, set in pairs(by_set) do redis.call('ZREM', KEYS[at], unpack(set)) end
forget(acked)
local remember = tonumber(ARGV[1])
if remember > 0 and #acked > 0 then
  local now = now_us()
  trim(KEYS[17], now)
  for _, id in ipairs(acked) do redis.call('ZADD', KEYS[17], number(now + remember), id) end
  -- The set disappears with the last of them, even if no client comes to trim it.
  local keep_ms = math.ceil(remember / 1000)
  if redis.call('PTTL', KEYS[17]) < keep_ms then redis.call('PEXPIRE', KEYS[17], keep_ms) end
end
return reply
