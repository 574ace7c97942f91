-- queue: the functions that the scripts of a reliable queue share. Needs clock. See
-- docs/redis-data-model.md.
--
-- Every script that touches messages has these keys first, in this order.
--
-- Keys:
--   live_0 to live_9  ZSETs  by priority: ids, scored by the next moment at which a client must act,
--                            microseconds: its due time while a message waits, the end of its lease
--                            while a worker has it. Below 0: suspects, whose last lease ended,
--                            scored by their due time with a minus
--   bodies            HASH   id to "enqueued_us headers", newline, payload
--   leases            HASH   id to "attempt:due:token", while leased and until the lease's end is
--                            handled; before the token a mark may come, a letter, the number of
--                            attempts that are forgiven, and a colon
--   attempts          HASH   id to the attempts used, while a message waits that has used some;
--                            behind a hyphen, the number of these that are forgiven
--   expiries          HASH   id to the end of its time to live, microseconds, where it has one
--   errors            HASH   id to the last error, where there was one
--   priorities        HASH   id to its priority, where that is not 0

-- A message whose lease ends may have killed its worker, or have been killed by a neighbour. So it
-- becomes a suspect, which is handed out alone, and its attempt counts towards its death only if it
-- was alone that time, too. The marks of a lease:
--   a  alone: a lost attempt counts
--   c  in company: a lost attempt is forgiven
--   s  a suspect: a lost attempt counts; if it is released, it is a suspect again
--   l  a suspect that was released: no client has it
--
-- Nothing here relies on fields that a foreign writer may have left: each one that cannot be read
-- has a default.

-- Beyond 2^53 a score is no longer exact.
local MAX_SCORE = 9007199254740992

-- Moments have quarters of a microsecond, which is as fine as a score is, and keeps the order
-- within one call.
local function format_score(moment) return string.format('%.2f', moment) end

-- Return the number that a text holds, or the default if it holds none, or not a sensible one.
local function number_or(default, text)
  local value = tonumber(text)
  if value and value > -MAX_SCORE and value < MAX_SCORE then return value end
  return default
end

-- Return the priorities, highest first; only 0 if no other is in use.
local function used_priorities()
  -- An array begins at 1, so this leaves out priority 0.
  if redis.call('EXISTS', unpack(live)) == 0 then return {0} end
  return {9, 8, 7, 6, 5, 4, 3, 2, 1, 0}
end

-- Return the first message that is not a suspect, and its moment; and whether there are suspects.
local function head_of(set)
  local head = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
  local has_suspects = head[2] and tonumber(head[2]) < 0 or false
  if has_suspects then head = redis.call('ZRANGEBYSCORE', set, 0, '+inf', 'WITHSCORES', 'LIMIT', 0, 1) end
  return head[1], head[2] and math.min(tonumber(head[2]), MAX_SCORE), has_suspects
end

-- Return the microseconds until a client must look again, suspects apart: 0 if that is now, -1 if
-- there is nothing to look for. Also return whether there are suspects.
local function wait_for_next(now)
  local wait, has_suspects = -1, false
  for _, priority in ipairs(used_priorities()) do
    local _, moment, some = head_of(live[priority])
    if moment then wait = shorter_wait(wait, math.max(0, math.ceil(moment) - now)) end
    has_suspects = has_suspects or some
  end
  return wait, has_suspects
end

-- Publish a hint, which changes nothing if the user may not publish: the others look every few
-- seconds as well. Never announce a moment that has passed: a client that has looked since then
-- would take the news for old.
local may_announce = true
local function announce(due, now)
  local receivers = redis.pcall('PUBLISH', wake, string.format('%.0f', math.max(math.ceil(due), now)))
  may_announce = may_announce and type(receivers) == 'number'
end

-- Make a message wait until it is due.
local function enqueue(id, priority, due, now)
  local set = live[priority]
  redis.call('ZADD', set, format_score(due), id)
  -- Tell the others only if they would wake too late otherwise.
  if head_of(set) == id then announce(due, now) end
end

local function enqueue_suspect(id, priority, due, now)
  redis.call('ZADD', live[priority], format_score(-due), id)
  announce(0, now)
end

local function parse_priority(text)
  local priority = number_or(0, text)
  return live[priority] and priority or 0
end

-- Return the priority and the score of a message; nil if it is in no set.
local function locate(id)
  local expected = parse_priority(redis.call('HGET', priorities, id))
  local score = redis.call('ZSCORE', live[expected], id)
  if score then return expected, tonumber(score) end
  for _, priority in ipairs(used_priorities()) do
    score = redis.call('ZSCORE', live[priority], id)
    if score then return priority, tonumber(score) end
  end
  return nil
end

-- Return {attempt, forgiven, due, mark} of a lease; nil if it cannot be read.
local function parse_lease(text)
  local attempt, due, rest = string.match(text or '', '^(%d+):([%d.]+):(.*)$')
  attempt, due = number_or(nil, attempt), number_or(nil, due)
  if not attempt or not due then return nil end
  local mark, forgiven = string.match(rest, '^([acls])(%d+):')
  return {attempt = attempt, forgiven = number_or(0, forgiven), due = due, mark = mark or 'a'}
end

local function has_token(lease_text, token) return lease_text and string.sub(lease_text, -#token - 1) == ':' .. token end

-- Return how many attempts are forgiven if this lease is lost.
local function forgiven_if_lost(lease) return lease.forgiven + (lease.mark == 'c' and 1 or 0) end

-- Return how many attempts are used, and how many of them are forgiven.
local function parse_attempts(text)
  local used, forgiven = string.match(text or '', '^(%d+)%-?(%d*)$')
  return number_or(0, used), number_or(0, forgiven)
end

local function format_attempts(used, forgiven) return forgiven > 0 and used .. '-' .. forgiven or used end

-- Return {priority, score, lease, leased, expired} of a live message; nil if there is none. A lease
-- that has ended no longer counts, even if no client has taken the message since. A message that
-- has expired and is not leased counts as absent.
local function find_message(id, now)
  if redis.call('HEXISTS', bodies, id) == 0 then return nil end
  local priority, score = locate(id)
  if not score then return nil end
  local found = {priority = priority, score = score, lease = parse_lease(redis.call('HGET', leases, id))}
  found.leased = found.lease ~= nil and score > now
  found.expired = not found.leased and number_or(MAX_SCORE, redis.call('HGET', expiries, id)) < now
  return found
end

-- Count the messages that have expired and are not leased, if that is cheap. Return how many are
-- due, and how many are not.
local function count_expired(now)
  local due, waiting = 0, 0
  local count = redis.call('HLEN', expiries)
  if count == 0 or count > 1000 then return due, waiting end
  local ids_and_ends = redis.call('HGETALL', expiries)
  for i = 1, #ids_and_ends, 2 do
    local found = number_or(MAX_SCORE, ids_and_ends[i + 1]) < now and find_message(ids_and_ends[i], now)
    if found and found.expired and found.score <= now then due = due + 1 end
    if found and found.expired and found.score > now then waiting = waiting + 1 end
  end
  return due, waiting
end

-- Drop ids that are no longer remembered, a bounded number of them: a few more than one call adds.
local function trim_done(now)
  local old = redis.call('ZRANGEBYSCORE', done, '-inf', format_score(now), 'LIMIT', 0, 400)
  if #old > 0 then redis.call('ZREM', done, unpack(old)) end
end

-- Return the hashes in which most messages have no field.
local function sparse_hashes() return attempts, expiries, errors, priorities end

-- Delete everything about these messages except their places in the live sets.
local function delete_details(ids)
  if #ids == 0 then return end
  redis.call('HDEL', bodies, unpack(ids))
  redis.call('HDEL', leases, unpack(ids))
  -- One look spares the others, which most queues do not have.
  if redis.call('EXISTS', sparse_hashes()) == 0 then return end
  for _, hash in ipairs({sparse_hashes()}) do redis.call('HDEL', hash, unpack(ids)) end
end

local function delete_message(id, priority)
  redis.call('ZREM', live[priority], id)
  delete_details({id})
end

-- Free the id of an expired message: it gets another one. The next claim drops or buries it.
local function free_id(id, found, now)
  local other
  repeat
    other, now = id .. '\0' .. string.format('%016.0f', now), now + 1
  until redis.call('HEXISTS', bodies, other) == 0
  local set = live[found.priority]
  redis.call('ZREM', set, id)
  redis.call('ZADD', set, format_score(found.score), other)
  for _, hash in ipairs({bodies, leases, sparse_hashes()}) do
    local value = redis.call('HGET', hash, id)
    if value then
      redis.call('HDEL', hash, id)
      redis.call('HSET', hash, other, value)
    end
  end
end

-- Return the facts about a message: {state, priority, moment, attempt, body, error}; false if it is
-- not live.
local function describe(id, now)
  local found = find_message(id, now)
  if not found or found.expired then return false end
  local lease, moment = found.lease, format_score(math.min(math.abs(found.score), MAX_SCORE))
  local state = found.leased and 'leased' or found.score <= now and 'ready' or 'delayed'
  local attempt = lease and lease.attempt or parse_attempts(redis.call('HGET', attempts, id))
  return {state, found.priority, moment, attempt, redis.call('HGET', bodies, id), redis.call('HGET', errors, id)}
end
