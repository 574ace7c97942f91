-- stats: count the messages in each state.
--
-- Keys:
--   messages  see include/queue.lua
--   dead    ZSET    names of dead letters, scored by their time of death, microseconds
--   paused  STRING  exists while no client may take anything: since when, ms; "1" if that is unknown
-- Roles: admin, dashboard
-- Repeatable: yes
--
-- Returns {delayed, ready, leased, dead, oldest_us, paused_us}. oldest_us: how long the oldest ready
-- one has been due, or a suspect without its lease, microseconds; 0 if there is none. paused_us: for
-- how long the queue has been paused; 0 if that is unknown, -1 if it is not paused.
-- include: clock
-- include: leases
-- include: queue

local now = now_us()
local oldest = 0
-- Expired messages count as absent, although no claim has dropped them yet.
local expired = count_expired(now)

-- Return the first score of a set: that of a message that has not expired, if one is near the head.
local function first_of(set)
  local first = redis.call('ZRANGE', set, 0, expired > 0 and 99 or 0, 'WITHSCORES')
  for i = 1, expired > 0 and #first or 0, 2 do
    if number_or(MAX_SCORE, redis.call('HGET', expiries, first[i])) >= now then return tonumber(first[i + 1]) end
  end
  return tonumber(first[#first])
end

-- Count the members up to now, and those after it.
local function count(set)
  local head = first_of(set)
  if not head then return 0, 0 end
  -- That of a suspect that waits: see suspect_score.
  if head < 0 and set == leased then head = head + MAX_SCORE end
  oldest = math.max(oldest, now - math.max(0, head))
  local past = redis.call('ZCOUNT', set, '-inf', now)
  return past, redis.call('ZCARD', set) - past
end

local ready, leased_count = count(leased)
local delayed = 0
for _, where in ipairs(used_sets()) do
  local due, later = count(waiting[where])
  ready, delayed = ready + due, delayed + later
end
if ready == expired then oldest = 0 end
local paused_us = redis.call('EXISTS', paused) - 1
if paused_us == 0 then
  -- A hint: users with the rights of an earlier release may not read it.
  local since = redis.pcall('GET', paused)
  local since_ms = type(since) == 'string' and number_or(1, since) or 1
  if since_ms > 1 then paused_us = math.max(1, now - since_ms * 1000) end
end
return {
  delayed, ready - expired, leased_count, redis.call('ZCARD', dead), math.floor(oldest), math.floor(paused_us),
}
