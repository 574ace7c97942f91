-- batches: messages that belong together, and what follows from them. Needs clock, leases, groups,
-- group_turns, queue and follow, and the key settings. See docs/redis-data-model.md.
--
-- Keys:
--   batches        HASH  batch to "created total ended forgotten", microseconds; total: how many
--                        messages it has, or "?" until all were offered; ended: 0 while some have
--                        not ended; forgotten: when it may be dropped, NEVER for not yet. And batch,
--                        NUL, "then" or "failure" to the message that follows when all were handled,
--                        or when the first one is lost to the batch: see follow.lua
--   batch_members  ZSET  batch, NUL, state, NUL and id of each message of a batch, all with the same
--                        score. state: "o" it has not ended, "h" it was handled, "d" it is a dead
--                        letter, "c" it was cancelled, or has expired; "f" it follows from the batch,
--                        and has not ended. And for each batch NUL, forgotten, NUL and batch
--
-- A batch is all of its messages' ids, each in one state, and no count: so an end that is reported
-- twice counts once. It has ended when it was offered whole and none of them is open. A dead letter
-- that is redriven is open again. A batch is remembered as long as something that belongs to it, or
-- follows from it, may come, and for a while after that.

-- How many members of batches that are forgotten one call drops.
local MOST_FORGOTTEN = 1000
-- For how long a batch is remembered at least, microseconds: an hour if all of it was handled, or a
-- week, because dead letters may be redriven.
local MEMORY_OF_HANDLED, MEMORY_OF_OTHERS = 3600000000, 604800000000
-- No score is larger.
local NEVER = 9007199254740991

-- Fail if a key of batches is of a foreign type: call this before the first write.
local function check_batches()
  redis.call('HGET', batches, '')
  redis.call('ZLEXCOUNT', batch_members, '[', '[')
end

-- Return the batches of messages whose bodies are these, {id, state, batch} of each.
local function members_of(ids, their_bodies, state)
  local members = {}
  for i, id in ipairs(ids) do
    local batch = batch_in(their_bodies[i])
    -- The id may be that of a message that has expired, and got another one: see free_id.
    if batch then members[#members + 1] = {string.match(id, '^(.*)%z%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d$') or id, state, batch} end
  end
  return members
end

-- Return the same of messages whose bodies are stored.
local function members_among(ids, state)
  if #ids == 0 or redis.call('EXISTS', batches) == 0 then return {} end
  return members_of(ids, redis.call('HMGET', bodies, unpack(ids)), state)
end

-- Return the range of the members of a batch that are in one state.
local function range_of(batch, state)
  local base = batch .. '\0' .. state
  return '[' .. base .. '\0', '(' .. base .. '\1'
end

local function count_members(batch, state) return redis.call('ZLEXCOUNT', batch_members, range_of(batch, state)) end

-- Let a member of a batch go from one state to another, and return whether it was in the first.
local function change_member(batch, id, from, to)
  if redis.call('ZREM', batch_members, batch .. '\0' .. from .. '\0' .. id) == 0 then return false end
  redis.call('ZADD', batch_members, 0, batch .. '\0' .. to .. '\0' .. id)
  return true
end

-- Return when a batch was created, how many messages it has, when it ended, and when it may be dropped,
-- as text; nil if there is no such batch.
local function read_batch(batch)
  return string.match(redis.call('HGET', batches, batch) or '', '^(%d+) (%S+) (%d+) (%d+)$')
end

-- Return the member of `batch_members` that tells when a batch may be dropped: they sort by that.
local function memory_of(batch, forgotten) return string.format('\0%016.0f\0', forgotten) .. batch end

-- Save the facts about a batch. Both keys disappear when all batches may be dropped, even if no client
-- comes to do it.
local function save_batch(batch, created, total, ended, forgotten, now)
  local _, _, _, before = read_batch(batch)
  redis.call('HSET', batches, batch, string.format('%s %s %.0f %.0f', created, total, ended, forgotten))
  redis.call('ZADD', batch_members, 0, memory_of(batch, forgotten))
  if before and tonumber(before) ~= forgotten then redis.call('ZREM', batch_members, memory_of(batch, tonumber(before))) end
  local last = redis.call('ZREVRANGEBYLEX', batch_members, '(\1', '[\0', 'LIMIT', 0, 1)[1]
  local keep_ms = string.format('%.0f', math.max(0, math.ceil((tonumber(string.sub(last, 2, 17)) - now) / 1000)))
  for _, key in ipairs({batches, batch_members}) do redis.pcall('PEXPIRE', key, keep_ms) end
end

-- Forget batches whose time is over: a few of them, and a bounded number of members.
local function forget_batches(now)
  local remaining = MOST_FORGOTTEN
  for _, member in ipairs(redis.call('ZRANGEBYLEX', batch_members, '[\0', '(' .. memory_of('', now), 'LIMIT', 0, 10)) do
    local batch = string.sub(member, 19)
    if remaining > 0 then
      local members = redis.call('ZRANGEBYLEX', batch_members, '[' .. batch .. '\0', '(' .. batch .. '\1', 'LIMIT', 0, remaining)
      if #members > 0 then redis.call('ZREM', batch_members, unpack(members)) end
      remaining = remaining - #members
    end
    if remaining > 0 then
      redis.call('HDEL', batches, batch, batch .. '\0then', batch .. '\0failure')
      redis.call('ZREM', batch_members, member)
    end
  end
end

-- Store what follows from a batch, if that was not done before.
local function follow_from(batch, event, now)
  local field = batch .. '\0' .. event
  local packed = redis.call('HGET', batches, field)
  if not packed then return end
  for _, follower in ipairs(parse_followers(packed)) do
    local base = batch .. '\0f\0'
    local is_stored = store_follower(follower, now) or redis.call('ZSCORE', batch_members, base .. follower.id)
    if not is_stored and follower.on_duplicate ~= 'ignore' then
      -- Another message has got its id since the batch was offered, and it is stored all the same.
      follower.id = batch .. '-' .. event
      is_stored = store_follower(follower, now)
    end
    if is_stored then redis.call('ZADD', batch_members, 0, base .. follower.id) end
  end
  redis.call('HDEL', batches, field)
end

-- Note that a batch has ended, if it has, and since when it is to be forgotten. `some_lost`: whether a
-- message that follows from it was not handled.
local function end_batch(batch, some_lost, now)
  local created, total, ended = read_batch(batch)
  if not created or total == '?' or count_members(batch, 'o') > 0 then return end
  local is_handled = count_members(batch, 'h') == tonumber(total)
  if is_handled then follow_from(batch, 'then', now) end
  local forgotten = NEVER
  if count_members(batch, 'f') == 0 then
    local keep_us = number_or(0, redis.call('HGET', settings, 'keep'))
    forgotten = now + math.max(keep_us, is_handled and not some_lost and MEMORY_OF_HANDLED or MEMORY_OF_OTHERS)
  end
  save_batch(batch, created, total, ended == '0' and now or tonumber(ended), forgotten, now)
  -- A hint for the clients that wait for it: they poll as well.
  if ended == '0' then redis.pcall('PUBLISH', settings, 'finished ' .. batch) end
end

-- Note that messages have ended, {id, state, batch} of each, and store what follows from their batches.
local function end_members(members, now)
  local changed, has_failed, some_lost = {}, {}, {}
  for _, member in ipairs(members) do
    local id, state, batch = unpack(member)
    local is_member = change_member(batch, id, 'o', state)
    if is_member or redis.call('ZREM', batch_members, batch .. '\0f\0' .. id) == 1 then
      if not changed[batch] then changed[#changed + 1], changed[batch] = batch, true end
      if is_member and state ~= 'h' and not has_failed[batch] then
        follow_from(batch, 'failure', now)
        has_failed[batch] = true
      elseif not is_member and state ~= 'h' then
        some_lost[batch] = true
      end
    end
  end
  for _, batch in ipairs(changed) do end_batch(batch, some_lost[batch], now) end
  if #changed > 0 then forget_batches(now) end
end

-- Let a message that is redriven belong to its batch again.
local function reopen_member(id, body, now)
  local batch = batch_in(body)
  local created, total, ended, forgotten = read_batch(batch or '')
  if not created then return end
  if change_member(batch, id, 'd', 'o') then
    ended = 0
  else
    -- It follows from the batch.
    redis.call('ZADD', batch_members, 0, batch .. '\0f\0' .. id)
  end
  save_batch(batch, created, total, tonumber(ended), total == '?' and tonumber(forgotten) or NEVER, now)
end
