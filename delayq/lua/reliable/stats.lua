-- stats: count the messages in each state.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  dead    ZSET    names of dead letters, scored by when they died, microseconds
-- KEYS[18]  paused  STRING  exists while no client may take anything
--
-- Returns {delayed, ready, leased, dead, oldest_us, paused, exact}: oldest_us for how long the oldest ready one has been due, 0
-- when there is none. Where `exact` is 0, some leases may have ended: those count as leased, and not as delayed.
-- include: clock
-- include: queue

local now = now_us()
local delayed, ready, oldest = 0, 0, 0
local sets = live_sets()
for _, at in ipairs(sets) do
  ready = ready + redis.call('ZCOUNT', KEYS[at], '-inf', number(now))
  delayed = delayed + redis.call('ZCOUNT', KEYS[at], '(' .. number(now), '+inf')
  local _, moment, suspects = head_of(KEYS[at])
  if suspects then
    local first = redis.call('ZRANGE', KEYS[at], '(0', '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')
    oldest = math.max(oldest, now + math.max(-now, tonumber(first[2])))
  end
  if moment then oldest = math.max(oldest, now - moment) end
end
-- Messages whose leases have ended are ready again. Finding them takes a look at each lease, or at each message that is ready.
local leased, exact = redis.call('HLEN', KEYS[12]), 1
if leased > 0 and leased <= 1000 then
  local leases = redis.call('HGETALL', KEYS[12])
  local ids, lasting = {}, 0
  for i = 1, #leases, 2 do
    if lease_of(leases[i + 1]) then ids[#ids + 1] = leases[i] end
  end
  for _, at in ipairs(#ids > 0 and sets or {}) do
    for _, moment in ipairs(redis.call('ZMSCORE', KEYS[at], unpack(ids))) do
      if moment and tonumber(moment) > now then lasting = lasting + 1 end
    end
  end
  leased = lasting
elseif leased > 0 and ready <= 1000 then
  for _, at in ipairs(sets) do
    local ids = redis.call('ZRANGEBYSCORE', KEYS[at], '-inf', number(now))
    for _, lease in ipairs(#ids > 0 and redis.call('HMGET', KEYS[12], unpack(ids)) or {}) do
      if lease then leased = leased - 1 end
    end
  end
elseif leased > 0 then
  exact = 0
end
-- Expired messages count as absent, although no claim has dropped them yet.
local gone, never_due = expired_of_all(now)
if ready == gone then oldest = 0 end
return {
  math.max(0, delayed - leased - never_due), ready - gone, math.min(leased, delayed), redis.call('ZCARD', KEYS[17]),
  math.floor(oldest), redis.call('EXISTS', KEYS[18]), exact,
}
