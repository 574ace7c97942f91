-- clock: the server's time in microseconds, the only clock that decides when a message is due.
local function now_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- Moments have quarters of a microsecond, which is as fine as a score is, and keeps the order
-- within one call.
local function format_score(moment) return string.format('%.2f', moment) end

-- Return the moment that an argument names by "@" and microseconds, as a number and as text; nil if
-- it is a delay.
local function moment_in(text)
  local digits = string.match(text, '^@(%d+)$')
  return tonumber(digits), digits
end

-- Return the due time in ms of a message offered now, after a delay in microseconds or at such a
-- moment; nil if that cannot be read. Rounded up, so that it is never early; without a delay, or
-- after its moment, it is due now.
local function due_ms(now, text)
  local moment, delay = moment_in(text), tonumber(text)
  local this_ms, due = (now - now % 1000) / 1000, nil
  if delay == 0 then return this_ms end
  if moment then
    due = math.max(moment, this_ms * 1000)
  elseif delay and delay > 0 then
    due = now + delay
  else
    return nil
  end
  local rest = due % 1000
  if rest > 0 then due = due - rest + 1000 end
  return due / 1000
end

-- Return the microseconds until the head of the sorted set is due: 0 if it is, -1 if there is none;
-- and for how many it has been due. `unit` is the unit of its scores, microseconds. With `skipped`,
-- that is the number of members to leave out at the head.
local function wait_us(set, now, unit, skipped)
  local head = redis.call('ZRANGE', set, skipped or 0, skipped or 0, 'WITHSCORES')
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

-- Drop members of a set that ended before `now`, a bounded number of them: a few more than one call
-- adds. If that is refused, the next call may do it.
local function trim_past(set, now)
  local past = redis.pcall('ZRANGEBYSCORE', set, '-inf', format_score(now), 'LIMIT', 0, 400)
  if #past > 0 then redis.pcall('ZREM', set, unpack(past)) end
end
