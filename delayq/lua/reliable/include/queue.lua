-- queue: what the scripts of a reliable queue share. Needs clock. See docs/redis-data-model.md.
--
-- The messages of a queue, KEYS[1] to KEYS[16] of every script that touches them:
--   1-10  live_0 ... live_9  ZSET  ids, scored by the next moment at which somebody must look, microseconds: its due time
--                                  while a message waits, the end of its lease while a worker has it; by priority
--   11    bodies             HASH  id to "enqueued_us headers", newline, payload
--   12    leases             HASH  id to "attempt:due:token", while leased
--   13    attempts           HASH  id to the attempts used, while a message waits that has used some
--   14    expiries           HASH  id to the end of its time to live, microseconds, where it has one
--   15    errors             HASH  id to the last error, where there was one
--   16    priorities         HASH  id to its priority, where that is not 0

-- Moments have quarters of a microsecond: as fine as a score is, and what keeps the order within one call.
local function number(moment) return string.format('%.2f', moment) end

-- The sorted sets, highest priority first; only the one of priority 0 where no other is in use.
local function live_sets()
  if redis.call('EXISTS', unpack(KEYS, 2, 10)) == 0 then return {1} end
  return {10, 9, 8, 7, 6, 5, 4, 3, 2, 1}
end

-- Microseconds until somebody must look again; 0 when that is now, -1 when there is nothing to look for.
local function wait_of_all(now)
  local wait = -1
  for _, at in ipairs(live_sets()) do wait = sooner(wait, wait_us(KEYS[at], now, 1)) end
  return wait
end

-- A hint, which changes nothing where the user may not publish: the others look every few seconds as well. Never a moment that
-- has passed: who has looked since then would take the news for old.
local may_announce = true
local function announce(due, wake)
  local heard = redis.pcall('PUBLISH', wake, string.format('%.0f', math.max(math.ceil(due), now_us())))
  may_announce = may_announce and type(heard) == 'number'
end

local function place(id, priority, due, wake)
  local live = KEYS[priority + 1]
  redis.call('ZADD', live, number(due), id)
  -- Tell the others only if they would wake too late.
  if redis.call('ZRANGE', live, 0, 0)[1] == id then announce(due, wake) end
end

local function priority_of(id) return tonumber(redis.call('HGET', KEYS[16], id) or 0) end

local function lease_of(value)
  local attempt, due, token = string.match(value, '^(%d+):([%d.]+):(.*)$')
  return tonumber(attempt), tonumber(due), token
end

local function holds(value, token) return value and string.sub(value, -#token - 1) == ':' .. token end

-- Whether a worker has the message. A lease that has ended counts no more, even if nobody has taken the message since.
local function is_leased(id, priority, now)
  if redis.call('HEXISTS', KEYS[12], id) == 0 then return false end
  return tonumber(redis.call('ZSCORE', KEYS[priority + 1], id) or 0) > now
end

-- Drop ids that are remembered no longer, a bounded number of them: a few more than one call adds.
local function trim(done, now)
  local old = redis.call('ZRANGEBYSCORE', done, '-inf', number(now), 'LIMIT', 0, 400)
  if #old > 0 then redis.call('ZREM', done, unpack(old)) end
end

-- Everything about these messages but their places in the sorted sets.
local function forget(ids)
  if #ids == 0 then return end
  -- Of most messages there is only the first: one look spares the others.
  local last = redis.call('EXISTS', unpack(KEYS, 13, 16)) == 0 and 12 or 16
  for at = 11, last do redis.call('HDEL', KEYS[at], unpack(ids)) end
end

-- The same, and their places.
local function remove(ids)
  for _, id in ipairs(ids) do redis.call('ZREM', KEYS[priority_of(id) + 1], id) end
  forget(ids)
end

-- What is known of a message: {state, priority, moment, attempt, body, error}; false when it is not live.
local function describe(id, now)
  local body = redis.call('HGET', KEYS[11], id)
  if not body then return false end
  local priority = priority_of(id)
  local moment = redis.call('ZSCORE', KEYS[priority + 1], id)
  local lease = redis.call('HGET', KEYS[12], id)
  local state, attempt = 'delayed', tonumber(redis.call('HGET', KEYS[13], id) or 0)
  if lease then attempt = lease_of(lease) end
  if tonumber(moment) <= now then
    state = 'ready'
  elseif lease then
    state = 'leased'
  end
  return {state, priority, moment, attempt, body, redis.call('HGET', KEYS[15], id)}
end
