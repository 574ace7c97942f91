-- queue: the functions that the scripts of a reliable queue share. Needs clock. See docs/redis-data-model.md.
--
-- The messages of a queue, KEYS[1] to KEYS[16] of every script that touches them:
--   1-10  live_0 ... live_9  ZSET  ids, scored by the next moment at which a client must act, microseconds: its due time
--                                  while a message waits, the end of its lease while a worker has it; by priority. Below
--                                  0: suspects, whose last lease ended, scored by their due time with a minus
--   11    bodies             HASH  id to "enqueued_us headers", newline, payload
--   12    leases             HASH  id to "attempt:due:token", while leased and until the lease's end is handled; before the
--                                  token a mark may come, a letter, how many attempts are forgiven, and a colon
--   13    attempts           HASH  id to the attempts used, while a message waits that has used some; behind a hyphen, how
--                                  many of these are forgiven
--   14    expiries           HASH  id to the end of its time to live, microseconds, where it has one
--   15    errors             HASH  id to the last error, where there was one
--   16    priorities         HASH  id to its priority, where that is not 0

-- A message whose lease ends may have killed its worker, or have been killed by a neighbour. So it becomes a suspect, which is
-- handed out alone, and its attempt counts towards its death only if it was alone that time, too. The marks of a lease:
--   a  alone: a lost attempt counts
--   c  in company: a lost attempt is forgiven
--   s  a suspect: a lost attempt counts; if it is released, it is a suspect again
--   l  a suspect that was released: no client has it
--
-- Nothing here relies on fields that a foreign writer may have left: each one that cannot be read has a default.

-- Beyond 2^53 a score is no longer exact.
local MOST = 9007199254740992

-- Moments have quarters of a microsecond, which is as fine as a score is, and keeps the order within one call.
local function number(moment) return string.format('%.2f', moment) end

-- Return the number that a text holds, or the default if it holds none, or not a sensible one.
local function finite(text, default)
  local value = tonumber(text)
  if value and value > -MOST and value < MOST then return value end
  return default
end

-- Return the places of the sorted sets in KEYS, highest priority first; only that of priority 0 if no other is in use.
local function live_sets()
  if redis.call('EXISTS', unpack(KEYS, 2, 10)) == 0 then return {1} end
  return {10, 9, 8, 7, 6, 5, 4, 3, 2, 1}
end

-- Return the first message that is not a suspect, and its moment; and whether there are suspects.
local function head_of(live)
  local head = redis.call('ZRANGE', live, 0, 0, 'WITHSCORES')
  local suspects = head[2] and tonumber(head[2]) < 0 or false
  if suspects then head = redis.call('ZRANGEBYSCORE', live, 0, '+inf', 'WITHSCORES', 'LIMIT', 0, 1) end
  return head[1], head[2] and math.min(tonumber(head[2]), MOST), suspects
end

-- Return the microseconds until a client must look again, suspects apart: 0 if that is now, -1 if there is nothing to look for.
-- Also return whether there are suspects.
local function wait_of_all(now)
  local wait, suspects = -1, false
  for _, at in ipairs(live_sets()) do
    local _, moment, some = head_of(KEYS[at])
    if moment then wait = sooner(wait, math.max(0, math.ceil(moment) - now)) end
    suspects = suspects or some
  end
  return wait, suspects
end

-- Publish a hint, which changes nothing if the user may not publish: the others look every few seconds as well. Never announce a
-- moment that has passed: a client that has looked since then would take the news for old.
local may_announce = true
local function announce(due, wake)
  local heard = redis.pcall('PUBLISH', wake, string.format('%.0f', math.max(math.ceil(due), now_us())))
  may_announce = may_announce and type(heard) == 'number'
end

local function place(id, priority, due, wake)
  local live = KEYS[priority + 1]
  redis.call('ZADD', live, number(due), id)
  -- Tell the others only if they would wake too late otherwise.
  if head_of(live) == id then announce(due, wake) end
end

-- Do the same for a suspect.
local function place_suspect(id, priority, due, wake)
  redis.call('ZADD', KEYS[priority + 1], number(-due), id)
  announce(0, wake)
end

local function as_priority(text)
  local priority = finite(text, 0)
  return priority % 1 == 0 and priority >= 0 and priority <= 9 and priority or 0
end

-- Return the priority and the score of a message; nil if it is in no set.
local function locate(id)
  local priority = as_priority(redis.call('HGET', KEYS[16], id))
  local score = redis.call('ZSCORE', KEYS[priority + 1], id)
  if score then return priority, tonumber(score) end
  for _, at in ipairs(live_sets()) do
    score = redis.call('ZSCORE', KEYS[at], id)
    if score then return at - 1, tonumber(score) end
  end
  return nil
end

-- Return {attempt, forgiven, due, mark} of a lease; nil if it cannot be read.
local function lease_of(value)
  local attempt, due, rest = string.match(value or '', '^(%d+):([%d.]+):(.*)$')
  attempt, due = finite(attempt), finite(due)
  if not attempt or not due then return nil end
  local mark, forgiven = string.match(rest, '^([acls])(%d+):')
  return {attempt = attempt, forgiven = finite(forgiven, 0), due = due, mark = mark or 'a'}
end

-- Return how many attempts are forgiven if this lease is lost.
local function forgiven_of(lease) return lease.forgiven + (lease.mark == 'c' and 1 or 0) end

-- Return how many attempts are used, and how many of them are forgiven.
local function tries_of(value)
  local used, forgiven = string.match(value or '', '^(%d+)%-?(%d*)$')
  return finite(used, 0), finite(forgiven, 0)
end

local function tries(used, forgiven) return forgiven > 0 and used .. '-' .. forgiven or used end

local function holds(value, token) return value and string.sub(value, -#token - 1) == ':' .. token end

-- Return {priority, score, lease, leased, expired} of a live message; nil if there is none. A lease that has ended no longer
-- counts, even if no client has taken the message since. A message that has expired and is not leased counts as absent.
local function find(id, now)
  if redis.call('HEXISTS', KEYS[11], id) == 0 then return nil end
  local priority, score = locate(id)
  if not score then return nil end
  local found = {priority = priority, score = score, lease = lease_of(redis.call('HGET', KEYS[12], id))}
  found.leased = found.lease ~= nil and score > now
  found.expired = not found.leased and finite(redis.call('HGET', KEYS[14], id), MOST) < now
  return found
end

-- Count the messages that have expired and are not leased, if that is cheap: how many are due, and how many are not.
local function expired_of_all(now)
  local due, waiting = 0, 0
  local count = redis.call('HLEN', KEYS[14])
  if count == 0 or count > 1000 then return due, waiting end
  local expiries = redis.call('HGETALL', KEYS[14])
  for i = 1, #expiries, 2 do
    local found = finite(expiries[i + 1], MOST) < now and find(expiries[i], now)
    if found and found.expired and found.score <= now then due = due + 1 end
    if found and found.expired and found.score > now then waiting = waiting + 1 end
  end
  return due, waiting
end

-- Drop ids that are no longer remembered, a bounded number of them: a few more than one call adds.
local function trim(done, now)
  local old = redis.call('ZRANGEBYSCORE', done, '-inf', number(now), 'LIMIT', 0, 400)
  if #old > 0 then redis.call('ZREM', done, unpack(old)) end
end

-- Delete everything about these messages but their places in the sorted sets.
local function forget(ids)
  if #ids == 0 then return end
  -- Most messages are only in the first hashes: one look spares the others.
  local last = redis.call('EXISTS', unpack(KEYS, 13, 16)) == 0 and 12 or 16
  for at = 11, last do redis.call('HDEL', KEYS[at], unpack(ids)) end
end

-- Do the same, and delete the message's place.
local function remove(id, priority)
  redis.call('ZREM', KEYS[priority + 1], id)
  forget({id})
end

-- Give an expired message another id, so that its own is free. The next claim drops or buries it.
local function set_aside(id, found, now)
  local other
  repeat
    other, now = id .. '\0' .. string.format('%016.0f', now), now + 1
  until redis.call('HEXISTS', KEYS[11], other) == 0
  redis.call('ZREM', KEYS[found.priority + 1], id)
  redis.call('ZADD', KEYS[found.priority + 1], number(found.score), other)
  for at = 11, 16 do
    local value = redis.call('HGET', KEYS[at], id)
    if value then
      redis.call('HDEL', KEYS[at], id)
      redis.call('HSET', KEYS[at], other, value)
    end
  end
end

-- Return the facts about a message: {state, priority, moment, attempt, body, error}; false if it is not live.
local function describe(id, now)
  local found = find(id, now)
  if not found or found.expired then return false end
  local lease, moment = found.lease, math.min(math.abs(found.score), MOST)
  local state = found.leased and 'leased' or found.score <= now and 'ready' or 'delayed'
  local attempt = lease and lease.attempt or tries_of(redis.call('HGET', KEYS[13], id))
  return {state, found.priority, number(moment), attempt, redis.call('HGET', KEYS[11], id), redis.call('HGET', KEYS[15], id)}
end
