-- stats: count the messages in each state.
--
-- Keys:
--   messages  see include/queue.lua
--   dead    ZSET    names of dead letters, scored by their time of death, microseconds
--   paused  STRING  exists while no client may take anything
-- Roles: admin, dashboard
-- Repeatable: yes
--
-- Returns {delayed, ready, leased, dead, oldest_us, paused, exact}. oldest_us: how long the oldest
-- ready one has been due, microseconds; 0 if there is none. If `exact` is 0, some leases may have
-- ended: those count as leased, and not as delayed.
-- include: clock
-- include: queue

local now = now_us()
local delayed, ready, oldest = 0, 0, 0
local priorities_to_count = used_priorities()
for _, priority in ipairs(priorities_to_count) do
  local set = live[priority]
  ready = ready + redis.call('ZCOUNT', set, '-inf', format_score(now))
  delayed = delayed + redis.call('ZCOUNT', set, '(' .. format_score(now), '+inf')
  local _, moment, has_suspects = head_of(set)
  if has_suspects then
    local first = redis.call('ZRANGE', set, '(0', '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')
    oldest = math.max(oldest, now + math.max(-now, tonumber(first[2])))
  end
  if moment then oldest = math.max(oldest, now - moment) end
end
-- Messages whose leases have ended are ready again. Finding them takes a look at each lease, or at
-- each message that is ready.
local leased, exact = redis.call('HLEN', leases), 1
if leased > 0 and leased <= 1000 then
  local ids_and_leases = redis.call('HGETALL', leases)
  local ids, lasting = {}, 0
  for i = 1, #ids_and_leases, 2 do
    if parse_lease(ids_and_leases[i + 1]) then ids[#ids + 1] = ids_and_leases[i] end
  end
  for _, priority in ipairs(#ids > 0 and priorities_to_count or {}) do
    for _, score in ipairs(redis.call('ZMSCORE', live[priority], unpack(ids))) do
      if score and tonumber(score) > now then lasting = lasting + 1 end
    end
  end
  leased = lasting
elseif leased > 0 and ready <= 1000 then
  for _, priority in ipairs(priorities_to_count) do
    local ids = redis.call('ZRANGEBYSCORE', live[priority], '-inf', format_score(now))
    for _, lease in ipairs(#ids > 0 and redis.call('HMGET', leases, unpack(ids)) or {}) do
      if lease then leased = leased - 1 end
    end
  end
elseif leased > 0 then
  exact = 0
end
-- Expired messages count as absent, although no claim has dropped them yet.
local expired_due, expired_waiting = count_expired(now)
if ready == expired_due then oldest = 0 end
return {
  math.max(0, delayed - leased - expired_waiting), ready - expired_due, math.min(leased, delayed), redis.call('ZCARD', dead),
  math.floor(oldest), redis.call('EXISTS', paused), exact,
}
