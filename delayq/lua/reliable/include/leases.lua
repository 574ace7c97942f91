-- leases: the facts about each message but for its due time, and the messages that workers have.
-- See docs/redis-data-model.md.
--
-- Every script that touches messages has these keys, in this order, behind the sets of those that
-- wait, if it needs them: see queue.lua.
--
-- Keys:
--   leased         ZSET  ids that workers have, scored by the end of the lease, whole microseconds.
--                        An end that has passed is that of a lost lease, which no claim has seen
--                        yet. A score below 0 is that of a suspect that waits: see suspect_score
--   tokens         HASH  id to the token of its lease, where that is not the end of the lease any
--                        more
--   bodies         HASH  id to "enqueued+delay", limits such as "x5t30000000", space and headers,
--                        newline, followers, payload; enqueued: microseconds in 16 digits, and quarters of one
--                        in further digits; delay: microseconds, such as 36e8; x: attempts; t:
--                        microseconds that a handler may take; f: bytes of followers; b: the
--                        batch; g: the group, quoted
--   attempts       HASH  id to "used-uncounted:due", where an attempt was used or the due time
--                        changed: the attempts before the lease, if it has one, and how many of
--                        them are uncounted; the due time if it is not that of the body, or
--                        nothing; at the end ":" and how many leases in a row were lost, if that is
--                        not 0
--   expiries       HASH  id to the end of its time to live, microseconds, where it has one
--   errors         HASH  id to the last error, where there was one
--   priorities     HASH  id to its priority, where that is not 0
--   positions      HASH  id to its position in its group, where it has one: see groups.lua
--   group_members  ZSET  position and id of each message of a group, all with the same score
--   group_waiting  ZSET  ids of messages of groups that wait, scored by their due time,
--                        microseconds
--   group_turns    ZSET  groups, scored by the moment at which one of these may be handed out
--   suspect_turns  ZSET  groups, scored by the moment at which one of their suspects may be
--   rate_log       ZSET  starts that rates count, all with the same score
--   expiry_index   ZSET  ids with a time to live, scored by the moment from which they count as
--                        absent, microseconds: its end, or that of the lease if that is later
--   checkpoints    HASH  id to what its handler has saved, where it has: a number, which rises with
--                        each save, and the rest, as delayq/_reliable/checkpoints.py packs it; and
--                        in front, what it has reported: see include/checkpoint.lua

-- The token of a lease is its end as decimal text. All messages of a claim have the same, which no
-- other lease has at that time; it stays the token when the lease is extended.
--
-- A message whose lease is lost may have killed its worker, or have been killed by a neighbour. The
-- first time, it is handed out again like any other: whatever a crash has interrupted goes on at
-- once. If the next lease is lost as well, the message is a suspect, and is handed out alone.
--
-- The end of a lease is odd if its client has had nothing else at work since the message was handed
-- out: then no neighbour can have killed the worker. Only suspects get such leases, and messages that
-- may have one or two attempts: for others, it makes no difference.
--
-- Nothing here relies on fields that a foreign writer may have left: each one that cannot be read
-- has a default.

-- Beyond 2^53 a score is no longer exact.
local MAX_SCORE = 9007199254740992

-- Return the number that a text holds, or the default if it holds none, or not a sensible one.
local function number_or(default, text)
  local value = tonumber(text)
  if value and value > -MAX_SCORE and value < MAX_SCORE then return value end
  return default
end

-- Return whether a message is alone in its worker, by the end of its lease.
local function is_alone(ends) return ends % 2 == 1 end

-- Return when a lease ends that begins now. A longer one could not be told from its neighbours.
local function end_of_lease(now, lease_us, for_alone)
  local ends = now + math.min(tonumber(lease_us), MAX_SCORE / 2)
  return is_alone(ends) == for_alone and ends or ends + 1
end

-- Return the end of a message's lease; nil if that is not the token of its lease, or not any more.
local function lease_end(id, token)
  local ends = redis.call('ZSCORE', leased, id)
  return ends and (redis.call('HGET', tokens, id) or ends) == token and tonumber(ends) or nil
end

-- Return the end of each of these leases, as text: false if the token is not that of the lease any
-- more. `runs` tells how many ids in a row have the same token, and the token, "99:token 1:token".
-- Also return the tokens.
local function read_leases(ids, runs, some_tokens)
  local ends = redis.call('ZMSCORE', leased, unpack(ids))
  local stored_tokens = some_tokens and redis.call('HMGET', tokens, unpack(ids)) or {}
  local given_tokens, at = {}, 0
  for count, token in string.gmatch(runs, '(%d+):(%S+)') do
    for i = at + 1, at + count do
      if (stored_tokens[i] or ends[i]) ~= token then ends[i] = false end
      given_tokens[i] = token
    end
    at = at + count
  end
  return ends, given_tokens
end

-- Return what is stored about a message's attempts: {used, uncounted, due, lost}. due: nil if the
-- body tells it.
local function parse_attempts(text)
  local used, uncounted, due, lost = string.match(text or '', '^(%d+)%-(%d+):([%d.]*):?(%d*)')
  return {used = number_or(0, used), uncounted = number_or(0, uncounted), due = number_or(nil, due), lost = number_or(0, lost)}
end

local function save_attempts(id, attempt_counts)
  local due, lost = attempt_counts.due and format_score(attempt_counts.due) or '', attempt_counts.lost > 0 and ':' .. attempt_counts.lost or ''
  redis.call('HSET', attempts, id, attempt_counts.used .. '-' .. attempt_counts.uncounted .. ':' .. due .. lost)
end

-- Return whether a message with these attempts may only be handed out alone.
local function is_suspect(attempt_counts) return attempt_counts.lost >= 2 end

-- Return the score of a suspect that waits, since a moment: below those of all leases.
local function suspect_score(moment) return string.format('%.0f', math.floor(moment) - MAX_SCORE) end

-- Count the attempt of a lease that is lost. A message that was alone, or has lost five in a row, is
-- to blame for all of these. Otherwise, the first three do not count.
local function lose(attempt_counts, ends)
  attempt_counts.used, attempt_counts.lost = attempt_counts.used + 1, attempt_counts.lost + 1
  if is_alone(ends) or attempt_counts.lost >= 5 then
    attempt_counts.uncounted = math.max(0, attempt_counts.uncounted - math.min(attempt_counts.lost - 1, 3))
  elseif attempt_counts.lost <= 3 then
    attempt_counts.uncounted = attempt_counts.uncounted + 1
  end
end

-- Return when a message is due: as stored with its attempts if it was retried or rescheduled, or
-- else by its body. And the moment that was asked for, if that is another: of several messages for
-- one moment, each is due a little later than the one before.
local function due_of(attempt_counts, body)
  if attempt_counts.due then return attempt_counts.due, attempt_counts.due end
  local enqueued, delay = string.match(body or '', '^(%d+)%+?([%de]*)')
  local whole, quarters = string.sub(enqueued or '', 1, 16), string.sub(enqueued or '', 17)
  local moment = (tonumber(whole) or 0) + (tonumber(delay) or 0)
  return math.min(moment + (tonumber(quarters) or 0) / 4, MAX_SCORE), math.min(moment, MAX_SCORE)
end

-- Return the batch that a body names; nil if none.
local function batch_in(body) return string.match(body or '', '^[%d+extf]*b(%d+)') end

-- Return the content of a message that takes the place of another one: it belongs to the same batch.
local function with_batch(content, replaced_body)
  local batch = batch_in(replaced_body)
  return batch and (string.gsub(content, '^[%dxtf]*', '%0b' .. batch, 1)) or content
end

-- Publish a hint, which changes nothing if the user may not publish: the others poll every few
-- seconds as well. Never announce a moment that has passed: a client that has claimed since then
-- would ignore it as outdated.
local may_announce = true
local function announce(due, now)
  local receivers = redis.pcall('PUBLISH', wake, string.format('%.0f', math.max(math.ceil(due), now)))
  may_announce = may_announce and type(receivers) == 'number'
end

-- Remember ids until a moment, unless they are remembered for longer.
local function remember(ids, ends, now)
  local scores = {}
  for i, id in ipairs(ids) do scores[i * 2 - 1], scores[i * 2] = format_score(ends), id end
  redis.call('ZADD', remembered, 'GT', unpack(scores))
  -- The set disappears with the last of them, even if no client comes to trim it. The work is done,
  -- and is not to be refused for that.
  local keep_ms, left_ms = math.ceil((ends - now) / 1000), redis.pcall('PTTL', remembered)
  if type(left_ms) == 'number' and left_ms < keep_ms then redis.pcall('PEXPIRE', remembered, keep_ms) end
end

-- Drop ids that are no longer remembered.
local function trim_remembered(now) trim_past(remembered, now) end

-- Return the hashes in which most messages have no field.
local function sparse_hashes() return tokens, attempts, expiries, errors, priorities, positions, checkpoints end

-- Fail if one of these keys is of a foreign type: call this before the first write.
local function check_details()
  for _, hash in ipairs({sparse_hashes()}) do redis.call('HGET', hash, '') end
  redis.call('ZSCORE', expiry_index, '')
end

-- Note from when on messages that workers now have count as absent: {id, end of the lease, ...}.
local function expire_after(ids_and_ends)
  local ids, later = {}, {}
  for i = 1, #ids_and_ends, 2 do ids[#ids + 1] = ids_and_ends[i] end
  for i, expiry in ipairs(redis.call('HMGET', expiries, unpack(ids))) do
    local ends = ids_and_ends[2 * i]
    if expiry then
      later[#later + 1] = format_score(math.max(number_or(MAX_SCORE, expiry), tonumber(ends)))
      later[#later + 1] = ids[i]
    end
  end
  if #later > 0 then redis.call('ZADD', expiry_index, unpack(later)) end
end

-- Delete everything about these messages but the members of sorted sets.
local function delete_details(ids)
  if #ids == 0 then return end
  redis.call('HDEL', bodies, unpack(ids))
  -- One call spares the others, because most queues do not have these keys.
  if redis.call('EXISTS', sparse_hashes()) == 0 then return end
  for _, hash in ipairs({sparse_hashes()}) do
    if redis.call('EXISTS', hash) == 1 then redis.call('HDEL', hash, unpack(ids)) end
  end
  if redis.call('EXISTS', expiry_index) == 1 then redis.call('ZREM', expiry_index, unpack(ids)) end
end
