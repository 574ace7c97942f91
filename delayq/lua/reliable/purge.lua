-- purge: drop messages in one state, a bounded number at a time.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- ARGV[1]  state   text  "delayed", "ready" or "all"; with all, those that workers have go too
-- ARGV[2]  offset  int   of the delayed ones, skip this many: leased ones are among them
-- ARGV[3]  limit   int   look at this many at most
--
-- Returns {dropped, passed_over, looked_at}: if fewer than `limit` were looked at, there are no more. Expired messages
-- are dropped, but not counted.
-- include: clock
-- include: queue

-- This needs a right that neither producers nor consumers have: they may remove single messages, but do not drop them all.
redis.call('ZCARD', KEYS[1])
local now = now_us()
local state, offset, limit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local from, to = '-inf', '+inf'
if state == 'ready' then to = number(now) end
if state == 'delayed' then from = '(' .. number(now) end
local dropped, passed_over, looked_at, expired = {}, 0, 0, 0
local some_expire = redis.call('EXISTS', KEYS[14]) == 1
for _, at in ipairs(live_sets()) do
  local found = {}
  if looked_at < limit then
    found = redis.call('ZRANGEBYSCORE', KEYS[at], from, to, 'WITHSCORES', 'LIMIT', offset, limit - looked_at)
  end
  if #found == 0 and offset > 0 then offset = math.max(0, offset - redis.call('ZCOUNT', KEYS[at], from, to)) end
  if #found > 0 then
    local ids, here = {}, {}
    for i = 1, #found, 2 do ids[#ids + 1] = found[i] end
    local leases = redis.call('HMGET', KEYS[12], unpack(ids))
    local expiries = some_expire and redis.call('HMGET', KEYS[14], unpack(ids)) or {}
    for i, id in ipairs(ids) do
      local leased = leases[i] and lease_of(leases[i]) and tonumber(found[i * 2]) > now
      if leased and state == 'delayed' then
        passed_over = passed_over + 1
      else
        here[#here + 1], dropped[#dropped + 1] = id, id
        if not leased and expiries[i] and finite(expiries[i], MOST) < now then expired = expired + 1 end
      end
    end
    offset, looked_at = 0, looked_at + #ids
    if #here > 0 then redis.call('ZREM', KEYS[at], unpack(here)) end
  end
end
forget(dropped)
return {#dropped - expired, passed_over, looked_at}
