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
--   limit     int   drop this many at most
--   since_us  int   when the purge began: what has followed from a batch since then stays
-- Roles: admin
-- Repeatable: yes
--
-- Returns {dropped, expired}: if these are fewer than `limit` together, there are no more.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue
-- include: kept_slots
-- include: follow
-- include: batches
-- include: at_rest

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

-- Drop a page of messages, of which `skipped` were spared before, and return how many are spared.
local function drop_page(set, skipped)
  local ids_and_scores = redis.call('ZRANGEBYSCORE', set, from, to, 'WITHSCORES', 'LIMIT', skipped, limit - #dropped)
  local ids, running, spared, page_bodies, page = {}, {}, 0, {}, {}
  for i = 1, #ids_and_scores, 2 do page[#page + 1] = ids_and_scores[i] end
  if some_batches and #page > 0 then page_bodies = redis.call('HMGET', bodies, unpack(page)) end
  for i, id in ipairs(page) do
    local body, score = page_bodies[i], ids_and_scores[2 * i]
    if body and is_spared(id, body) then
      spared = spared + 1
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
  return spared
end

local function drop_from(set)
  local skipped, spared = 0, 0
  repeat
    skipped = skipped + spared
    spared = #dropped < limit and drop_page(set, skipped) or 0
  until spared == 0
end

if state ~= 'delayed' then drop_from(leased) end
for _, where in ipairs(sets) do drop_from(waiting[where]) end
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
return {#dropped - expired, expired}
