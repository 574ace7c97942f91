-- purge: drop messages in one state, a bounded number at a time.
--
-- Keys:
--   messages  see include/queue.lua
-- Arguments:
--   state   text  "delayed", "ready" or "all"; with all, those that workers have go too
--   offset  int   of the delayed ones, skip this many: leased ones are among them
--   limit   int   look at this many at most
-- Roles: admin
-- Repeatable: yes
--
-- Returns {dropped, passed_over, looked_at}: if fewer than `limit` were looked at, there are no
-- more. Expired messages are dropped, but not counted.
-- include: clock
-- include: queue

-- This needs a right that neither producers nor consumers have: they may remove single messages,
-- but do not drop them all.
redis.call('ZCARD', live[0])
local now = now_us()
offset, limit = tonumber(offset), tonumber(limit)
local from, to = '-inf', '+inf'
if state == 'ready' then to = format_score(now) end
if state == 'delayed' then from = '(' .. format_score(now) end
local dropped, passed_over, looked_at, expired = {}, 0, 0, 0
local some_expire = redis.call('EXISTS', expiries) == 1
for _, priority in ipairs(used_priorities()) do
  local set, found = live[priority], {}
  if looked_at < limit then
    found = redis.call('ZRANGEBYSCORE', set, from, to, 'WITHSCORES', 'LIMIT', offset, limit - looked_at)
  end
  if #found == 0 and offset > 0 then offset = math.max(0, offset - redis.call('ZCOUNT', set, from, to)) end
  if #found > 0 then
    local ids, dropped_here = {}, {}
    for i = 1, #found, 2 do ids[#ids + 1] = found[i] end
    local lease_texts = redis.call('HMGET', leases, unpack(ids))
    local ends = some_expire and redis.call('HMGET', expiries, unpack(ids)) or {}
    for i, id in ipairs(ids) do
      local is_leased = parse_lease(lease_texts[i]) and tonumber(found[i * 2]) > now
      if is_leased and state == 'delayed' then
        passed_over = passed_over + 1
      else
        dropped_here[#dropped_here + 1], dropped[#dropped + 1] = id, id
        if not is_leased and number_or(MAX_SCORE, ends[i]) < now then expired = expired + 1 end
      end
    end
    offset, looked_at = 0, looked_at + #ids
    if #dropped_here > 0 then redis.call('ZREM', set, unpack(dropped_here)) end
  end
end
delete_details(dropped)
return {#dropped - expired, passed_over, looked_at}
