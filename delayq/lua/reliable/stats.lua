-- stats: how many messages are where.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  dead    ZSET    ids of dead letters, scored by when they died, microseconds
-- KEYS[18]  paused  STRING  there while nobody shall get anything
--
-- Returns {delayed, ready, leased, dead, oldest_us, paused}: oldest_us for how long the oldest ready one has been due, 0
-- when there is none.
-- include: clock
-- include: queue

local now = now_us()
local delayed, ready, oldest = 0, 0, 0
for _, at in ipairs(live_sets()) do
  ready = ready + redis.call('ZCOUNT', KEYS[at], '-inf', number(now))
  delayed = delayed + redis.call('ZCOUNT', KEYS[at], '(' .. number(now), '+inf')
  local head = redis.call('ZRANGE', KEYS[at], 0, 0, 'WITHSCORES')
  if head[2] then oldest = math.max(oldest, now - tonumber(head[2])) end
end
-- Leases that have ended are ready again. To know them takes a look at each lease: no more of those than workers hold.
local leased = redis.call('HLEN', KEYS[12])
if leased > 0 and leased <= 1000 then
  local ids = redis.call('HKEYS', KEYS[12])
  leased = 0
  for _, at in ipairs(live_sets()) do
    for _, moment in ipairs(redis.call('ZMSCORE', KEYS[at], unpack(ids))) do
      if moment and tonumber(moment) > now then leased = leased + 1 end
    end
  end
end
-- Those that are not looked at may have ended; but not more of them run than stand among what is not due.
leased = math.min(leased, delayed)
return {delayed - leased, ready, leased, redis.call('ZCARD', KEYS[17]), math.floor(oldest), redis.call('EXISTS', KEYS[18])}
