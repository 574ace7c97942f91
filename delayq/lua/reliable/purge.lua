-- purge: drop messages in one state, a bounded number at a time.
--
-- Keys:
--   messages    see include/queue.lua
--   wake        CHANNEL  where a new head is announced: its due time, microseconds
--   settings    HASH     see include/settings.lua; and CHANNEL of that name, where the end of
--                        messages is announced: "finished", for all of them
--   kept_slots  ZSET     names of cancelled messages that keep their slots, scored by the end of
--                        their leases, microseconds: see include/kept_slots.lua
--   batches     see include/batches.lua
-- Arguments:
--   state     text  "delayed", "ready" or "all"; with all, those that workers have go too
--   limit     int   look at this many at most
--   since_us  int   when the purge began: messages that followed from batches since are spared
--   after     text  go on behind this place; empty: begin
-- Roles: admin
-- Repeatable: yes
--
-- Returns {dropped, expired, is_end, after}. is_end: whether it has come to the end of all messages;
-- after: the place to go on behind, which is empty as long as none was spared. Messages may move to
-- places that were passed, so begin again until there is an end without any that was dropped.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue
-- include: kept_slots
-- include: follow
-- include: batches
-- include: at_rest

-- Bytes of bodies after which one call looks at no more messages.
local MOST_BYTES = 1048576

-- This needs a right that neither producers nor consumers have: they may remove single messages,
-- but do not drop them all.
redis.call('ZCARD', waiting[0])
local some_grouped = redis.call('EXISTS', positions) == 1
-- A key of a foreign type must fail before the first write.
check_messages()
local keep = redis.call('HGET', settings, 'keep')
local lengths, sets = {}, used_sets()
for i, hash in ipairs({sparse_hashes()}) do lengths[i] = redis.call('HLEN', hash) end
redis.call('ZSCORE', kept_slots, '')
check_batches()
local now = now_us()
limit, since_us = tonumber(limit), tonumber(since_us)
local some_batches, members = redis.call('EXISTS', batches) == 1, {}
local from, to = '-inf', '+inf'
if state == 'ready' then to = format_score(now) end
if state == 'delayed' then from = '(' .. format_score(now) end
local dropped, expired = {}, 0
local some_expire = redis.call('EXISTS', expiries) == 1
local is_limited = some_grouped or parse_limit(redis.call('HGET', settings, 'share')) ~= nil

-- Return whether a message with this body has followed from a batch since the purge began: it may tell
-- that an earlier page has dropped messages of the batch.
local function is_spared(id, body)
  local batch = batch_in(body)
  if not batch or number_or(0, string.sub(body, 1, 16)) < since_us then return false end
  return redis.call('ZSCORE', batch_members, batch .. '\0f\0' .. id)
end

-- The place to go on behind: the number of a set; the score of the last message that was spared there,
-- and how many were spared that have this score, both 0 if none was; and its id.
local place, last_score, ties, last_id = string.match(after, '^(%d+) (%S+) (%d+) (.*)$')
place, last_score, ties, last_id = tonumber(place or 0), last_score or '0', tonumber(ties or 0), last_id or ''
local some_spared, is_full, looked_at, size = after ~= '', false, 0, 0

-- Return the first score, and the number of messages with that score to skip, to go on in a set.
local function begin_in(set)
  if ties == 0 or (state == 'delayed' and tonumber(last_score) <= now) then
    ties = 0
    return from, 0
  end
  -- Others of this score may have come or gone meanwhile.
  local last = redis.call('ZRANGEBYSCORE', set, last_score, last_score, 'LIMIT', ties - 1, 1)[1]
  if last ~= last_id then ties = 0 end
  return last_score, ties
end

-- Return up to a page of messages of a set: their ids, and their scores. A table for each would double
-- what the server's garbage collector frees after some calls.
local function page_in(set)
  local first, skipped = begin_in(set)
  local ids_and_scores = redis.call('ZRANGEBYSCORE', set, first, to, 'WITHSCORES', 'LIMIT', skipped, limit - looked_at)
  local ids, scores = {}, {}
  for i = 1, #ids_and_scores, 2 do
    is_full = is_full or size >= MOST_BYTES
    if is_full then break end
    local id = ids_and_scores[i]
    if some_batches then size = size + redis.call('HSTRLEN', bodies, id) end
    ids[#ids + 1], scores[#scores + 1], looked_at = id, ids_and_scores[i + 1], looked_at + 1
  end
  is_full = is_full or looked_at == limit
  return ids, scores
end

-- Drop a page of messages of a set, but those that are spared.
local function drop_page(set)
  local page, scores = page_in(set)
  local ids, running, page_bodies = {}, {}, {}
  if some_batches and #page > 0 then page_bodies = redis.call('HMGET', bodies, unpack(page)) end
  for i, id in ipairs(page) do
    local score, body = scores[i], page_bodies[i]
    if body and is_spared(id, body) then
      ties = score == last_score and ties + 1 or 1
      some_spared, last_score, last_id = true, score, id
    else
      local is_leased = set == leased and tonumber(score) > now
      local expiry = some_expire and not is_leased and redis.call('HGET', expiries, id)
      if number_or(MAX_SCORE, expiry) < now then expired = expired + 1 end
      if is_leased and is_limited then running[#running + 1] = {id, redis.call('HGET', tokens, id) or score, score} end
      ids[#ids + 1], dropped[#dropped + 1] = id, id
      if body then members[#members + 1] = members_of({id}, {body}, 'c')[1] end
    end
  end
  if #ids > 0 then redis.call('ZREM', set, unpack(ids)) end
  for _, message in ipairs(running) do keep_slots(unpack(message)) end
end

waiting.leased = leased
if state ~= 'delayed' then table.insert(sets, 1, 'leased') end
for _, where in ipairs(sets) do
  local number = where == 'leased' and 1 or where == 'grouped' and 12 or 11 - where
  if number >= place and not is_full then
    if number > place then place, last_score, ties, last_id = number, '0', 0, '' end
    drop_page(waiting[where])
  end
end
local groups = some_grouped and leave_groups(dropped) or {}
if #dropped > 0 then
  redis.call('HDEL', bodies, unpack(dropped))
  for i, hash in ipairs({sparse_hashes()}) do
    if lengths[i] > 0 then redis.call('HDEL', hash, unpack(dropped)) end
  end
  if some_expire then redis.call('ZREM', expiry_index, unpack(dropped)) end
end
update_turns(groups, now)
if state ~= 'delayed' and awaits_slot() then free_slot(now) end
end_members(members, now)
-- A hint for the clients that wait for the end of one of them: they poll as well.
if #dropped > 0 and keep then redis.pcall('PUBLISH', settings, 'finished') end
return {#dropped - expired, expired, is_full and 0 or 1, some_spared and table.concat({place, last_score, ties, last_id}, ' ') or ''}
