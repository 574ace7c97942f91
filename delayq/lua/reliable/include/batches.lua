-- batches: messages that belong together, and what follows from them. Needs clock, leases, groups,
-- group_turns, queue and follow, and the key settings. See docs/redis-data-model.md.
--
-- Keys:
--   batches        HASH  batch to "created total ended forgotten", microseconds; total: how many
--                        messages it has, or "?" until all were offered; ended: 0 while some have
--                        not ended; forgotten: when it may be dropped, 0 for not yet. And batch, NUL,
--                        "then" or "failure" to the message that follows when all were handled, or
--                        when the first one is lost to the batch: see follow.lua
--   batch_members  ZSET  batch, NUL, state, NUL and id of each message of a batch, all with the same
--                        score. state: "o" it has not ended, "h" it was handled, "d" it is a dead
--                        letter, "c" it was cancelled, or has expired
--
-- A batch is all of its messages' ids, each in one state, and no count: so an end that is reported
-- twice counts once. It has ended when it was offered whole and none of them is open. A dead letter
-- that is redriven is open again.

-- How many members of batches that are forgotten one call drops.
local MOST_FORGOTTEN = 1000
-- For how long a batch is remembered at least, microseconds: an hour if all of it was handled, or a
-- week, because dead letters may be redriven.
local MEMORY_OF_HANDLED, MEMORY_OF_OTHERS = 3600000000, 604800000000

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

local function save_batch(batch, created, total, ended, forgotten)
  redis.call('HSET', batches, batch, string.format('%s %s %.0f %.0f', created, total, ended, forgotten))
end

-- Store what follows from a batch, if that was not done before.
local function follow_from(batch, event, now)
  local field = batch .. '\0' .. event
  local packed = redis.call('HGET', batches, field)
  if not packed then return end
  for _, follower in ipairs(parse_followers(packed)) do store_follower(follower, now) end
  redis.call('HDEL', batches, field)
end

-- Note that a batch has ended, if it has.
local function end_batch(batch, now)
  local created, total = read_batch(batch)
  if not created or total == '?' or count_members(batch, 'o') > 0 then return end
  local is_handled = count_members(batch, 'h') == tonumber(total)
  if is_handled then follow_from(batch, 'then', now) end
  local keep_us = number_or(0, redis.call('HGET', settings, 'keep'))
  save_batch(batch, created, total, now, now + math.max(keep_us, is_handled and MEMORY_OF_HANDLED or MEMORY_OF_OTHERS))
  -- A hint for the clients that wait for it: they poll as well.
  redis.pcall('PUBLISH', settings, 'finished ' .. batch)
end

-- Note that messages have ended, {id, state, batch} of each, and store what follows from their batches.
local function end_members(members, now)
  local changed = {}
  for _, member in ipairs(members) do
    local id, state, batch = unpack(member)
    if change_member(batch, id, 'o', state) then
      if not changed[batch] then changed[#changed + 1], changed[batch] = batch, true end
      if state ~= 'h' then follow_from(batch, 'failure', now) end
    end
  end
  for _, batch in ipairs(changed) do end_batch(batch, now) end
end

-- Let a message that is redriven belong to its batch again.
local function reopen_member(id, body)
  local batch = batch_in(body)
  if not batch or not change_member(batch, id, 'd', 'o') then return end
  local created, total, _, forgotten = read_batch(batch)
  if created then save_batch(batch, created, total, 0, total == '?' and tonumber(forgotten) or 0) end
end

-- Forget some of the batches whose time is over: of a few that the server chooses, and a bounded number
-- of members. So they never become many more than those that still count.
local function forget_batches(now)
  local remaining = MOST_FORGOTTEN
  for _, batch in ipairs(redis.call('HRANDFIELD', batches, 10)) do
    local _, _, _, forgotten = read_batch(batch)
    forgotten = tonumber(forgotten or '0')
    if forgotten > 0 and forgotten < now and remaining > 0 then
      local members = redis.call('ZRANGEBYLEX', batch_members, '[' .. batch .. '\0', '(' .. batch .. '\1', 'LIMIT', 0, remaining)
      if #members > 0 then redis.call('ZREM', batch_members, unpack(members)) end
      remaining = remaining - #members
      if remaining > 0 then redis.call('HDEL', batches, batch, batch .. '\0then', batch .. '\0failure') end
    end
  end
end
