-- clock: the server's time in microseconds, the only clock that decides when a message is due.
local function now_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- Return the due time in ms of a message offered now. Rounded up, so that it is never early;
-- without a delay, it is due now.
local function due_ms(now, delay)
  if delay == 0 then return (now - now % 1000) / 1000 end
  local due = now + delay
  local rest = due % 1000
  if rest > 0 then due = due - rest + 1000 end
  return due / 1000
end

-- Return the microseconds until the head of the sorted set is due: 0 if it is, -1 if there is none;
-- and for how many it has been due. `unit` is the unit of its scores, microseconds.
local function wait_us(set, now, unit)
  local head = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
  if not head[2] then return -1, 0 end
  -- A foreign writer may have left a fraction or an infinity.
  local due = math.max(-9007199254740992, math.min(math.ceil(tonumber(head[2])), 9007199254740992))
  local wait = math.max(-9007199254740992, math.min(due * unit - now, 9007199254740992))
  return math.max(0, wait), math.max(0, -wait)
end

-- Return the shorter of two such waits.
local function shorter_wait(a, b)
  if a < 0 then return b end
  if b < 0 then return a end
  return math.min(a, b)
end
