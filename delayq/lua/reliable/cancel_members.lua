-- cancel_members: end messages of a batch that have expired, and cancel others, a bounded number at a
-- time.
--
-- Keys:
--   messages       see include/queue.lua
--   wake           CHANNEL  where a free slot is announced, microseconds
--   dead           ZSET     names of dead letters, scored by their time of death, microseconds
--   dead_messages  HASH     name to the reason, as JSON, newline, body: see include/letters.lua
--   settings       HASH     see include/settings.lua; and CHANNEL of that name, where the cancellation
--                           of a message that a worker has is announced: "cancelled", the token of its
--                           lease, and its id; and the end of messages: "finished", for all of them
--   kept_slots     ZSET     names of cancelled messages that keep their slots, scored by the end of
--                           their leases, microseconds: see include/kept_slots.lua
--   batches        see include/batches.lua
-- Arguments:
--   batch  text  its id
--   scope  text  "expired": end those that have expired, and no others; "waiting": cancel those that
--                no worker has, too; "all": also those that workers have
--   after  text  go on behind this id; empty: begin
-- Roles: producer, consumer, admin
-- Repeatable: no
--
-- Returns {cancelled, after}, or nothing if there is no such batch. cancelled: how many, without those
-- that have expired; after: the id to go on behind, or empty if there are no more.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue
-- include: letters
-- include: kept_slots
-- include: follow
-- include: batches
-- include: at_rest

-- How many members one call looks at; how many bodies it reads at a time; and bytes of bodies after
-- which it reads no more.
local MOST_MEMBERS, BODIES_AT_ONCE, MOST_BYTES = 500, 100, 1048576

-- A key of a foreign type must fail before the first write, and before any worker is told.
check_messages()
check_letters()
redis.call('ZSCORE', kept_slots, '')
check_batches()
local created, total = read_batch(batch)
if not created then return false end
local now = now_us()
local expired_fate, keep_dead, max_dead, keep = unpack(redis.call('HMGET', settings, 'expired', 'keep_dead', 'max_dead', 'keep'))

-- Return the ids of a page of members in a state.
local function page_of(state, behind, most)
  local base, ids = batch .. '\0' .. state .. '\0', {}
  local _, to = range_of(batch, state)
  for i, member in ipairs(redis.call('ZRANGEBYLEX', batch_members, '(' .. base .. behind, to, 'LIMIT', 0, most)) do
    ids[i] = string.sub(member, #base + 1)
  end
  return ids
end

-- Return those of these ids whose messages have expired. A message that a worker has does not expire.
local function expired_among(ids)
  local expired = {}
  if #ids == 0 or redis.call('EXISTS', expiry_index) == 0 then return expired end
  for i, score in ipairs(redis.call('ZMSCORE', expiry_index, unpack(ids))) do
    if score and tonumber(score) < now then expired[#expired + 1], expired[ids[i]] = ids[i], true end
  end
  return expired
end

local ids = page_of('o', after, MOST_MEMBERS)
local last_id, is_whole_page = ids[#ids], #ids == MOST_MEMBERS
local has_expired = expired_among(ids)
if scope == 'expired' then ids = {unpack(has_expired)} end
local open_count = #ids
-- What follows from the batch may expire, but is not cancelled with it.
local followers = after == '' and page_of('f', '', MOST_MEMBERS) or {}
for _, id in ipairs(expired_among(followers)) do
  ids[#ids + 1], has_expired[id] = id, true
end
local has_lease = {}
for i, score in ipairs(#ids > 0 and redis.call('ZMSCORE', leased, unpack(ids)) or {}) do
  has_lease[ids[i]] = score and tonumber(score) > now and score
end

-- Each list is carried out at once.
local gone, members, letters, running, cancelled, size = {}, {}, {}, {}, 0, 0
local read_to = 0
while read_to < #ids and size < MOST_BYTES do
  local count, length = 0, size
  repeat
    count = count + 1
    length = length + redis.call('HSTRLEN', bodies, ids[read_to + count])
  until count == BODIES_AT_ONCE or read_to + count == #ids or length >= MOST_BYTES
  for i, body in ipairs(redis.call('HMGET', bodies, unpack(ids, read_to + 1, read_to + count))) do
    local id = ids[read_to + i]
    local is_ours = body and batch_in(body) == batch
    size = size + #(body or '')
    if is_ours and has_expired[id] then
      if expired_fate == 'dead' then letters[#letters + 1] = {id, body} end
      gone[#gone + 1], members[#members + 1] = id, {id, expired_fate == 'dead' and 'd' or 'c', batch}
    elseif is_ours and (not has_lease[id] or scope == 'all') then
      if has_lease[id] then running[#running + 1] = id end
      gone[#gone + 1], members[#members + 1], cancelled = id, {id, 'c', batch}, cancelled + 1
    elseif not is_ours and total == '?' and scope ~= 'expired' then
      -- It may still be about to be stored: if it left the batch, nobody would miss it there.
      members[#members + 1] = {id, 'c', batch}
    elseif not is_ours and total ~= '?' then
      -- It has expired, and its id was freed; or the server has lost it.
      members[#members + 1] = {id, expired_fate == 'dead' and 'd' or 'c', batch}
    end
  end
  read_to = read_to + count
end
for _, id in ipairs(followers) do
  -- The queue was moved to other partitions just when it followed, and so it has ended elsewhere.
  if redis.call('HEXISTS', bodies, id) == 0 then members[#members + 1] = {id, 'c', batch} end
end
-- Those that were not read come with the next call.
if read_to < open_count then last_id, is_whole_page = ids[read_to], true end
demand_removal()

if #gone > 0 then
  local waits_for_slot = awaits_slot()
  for _, letter in ipairs(letters) do
    local id, body = unpack(letter)
    local attempt = find_attempts(id, find_message(id, now) or {}).used
    local why = {reason = 'expired', attempt = attempt, priority = priority_of(id), error = redis.call('HGET', errors, id) or nil}
    add_letter(id, cjson.encode(why), body, now, redis.call('HGET', checkpoints, id))
  end
  for _, id in ipairs(running) do
    -- A hint, which changes nothing if it is refused: a worker finds out when it renews the lease.
    local token = redis.call('HGET', tokens, id) or has_lease[id]
    redis.pcall('PUBLISH', settings, 'cancelled ' .. token .. ' ' .. id)
    keep_slots(id, token, has_lease[id])
  end
  redis.call('ZREM', leased, unpack(gone))
  for _, where in ipairs(used_sets()) do redis.call('ZREM', waiting[where], unpack(gone)) end
  local groups = leave_groups(gone)
  delete_details(gone)
  update_turns(groups, now)
  if waits_for_slot then free_slot(now) end
end
end_members(members, now)
if #letters > 0 and (keep_dead or max_dead) then trim_letters(number_or(0, keep_dead), number_or(0, max_dead), now) end
-- A hint for the clients that wait for the end of one of them: they poll as well.
if #gone > 0 and keep then redis.pcall('PUBLISH', settings, 'finished') end
return {cancelled, is_whole_page and last_id or ''}
