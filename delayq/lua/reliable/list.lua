-- list: look at messages in one state. Those that wait come in the order in which they are handed
-- out, but all suspects first, and those of groups last; leased ones by the end of the lease.
--
-- Keys:
--   messages  see include/queue.lua
--   settings  HASH  see include/settings.lua
-- Arguments:
--   state   text  "delayed", "ready" or "leased"
--   brief   int   1: leave out attempt, body and error
--   offset  int   skip this many
--   limit   int   look at this many at most; 0: only count the messages in that state
-- Roles: admin, dashboard
-- Repeatable: yes
--
-- Returns {id, {state, priority, moment, attempt, body, error}, ...}, with nil for a message that has
-- expired: it counts towards the offset of the next page. If these are fewer than `limit`, there are
-- no more. With a limit of 0, returns {count, expired}: how many there are, and how many of these have
-- expired.
-- include: clock
-- include: leases
-- include: queue
-- include: at_rest

local now = now_us()
offset, limit = tonumber(offset), tonumber(limit)
local counts, count = limit == 0, 0
local reply = {}
local from, to = '-inf', format_score(now)
if state ~= 'ready' then from, to = '(' .. to, '+inf' end

-- Add messages of one set to the reply.
local function add(set, ids_and_scores)
  local ids = {}
  for i = 1, #ids_and_scores, 2 do ids[#ids + 1] = ids_and_scores[i] end
  local ends, stored_attempts = redis.call('HMGET', expiries, unpack(ids)), redis.call('HMGET', attempts, unpack(ids))
  local ranks = redis.call('HMGET', priorities, unpack(ids))
  -- Bodies may be large, so they are read only if they are needed.
  local texts, failures = {}, {}
  if brief == '0' then
    texts, failures = redis.call('HMGET', bodies, unpack(ids)), redis.call('HMGET', errors, unpack(ids))
  end
  for i, id in ipairs(ids) do
    local score = tonumber(ids_and_scores[2 * i])
    local message = {score = score, leased = set == leased and score > now, lost = set == leased and score >= 0 and score <= now}
    local attempt_counts, priority = parse_attempts(stored_attempts[i]), parse_priority(ranks[i])
    local is_live = texts[i] or brief == '1' and redis.call('HEXISTS', bodies, id) == 1
    local facts = false
    if is_live and (message.leased or number_or(MAX_SCORE, ends[i]) >= now) then
      local body = texts[i] or (message.lost or is_suspect(attempt_counts) and not message.leased) and redis.call('HGET', bodies, id)
      facts = describe(message, now, attempt_counts, priority, body, failures[i])
    end
    if facts and brief == '1' then facts = {facts[1], facts[2], facts[3]} end
    reply[#reply + 1], reply[#reply + 2] = id, facts
  end
end

local function list_from(set)
  if counts then count = count + redis.call('ZCOUNT', set, from, to) end
  if limit == 0 then return end
  local ids_and_scores = redis.call('ZRANGEBYSCORE', set, from, to, 'WITHSCORES', 'LIMIT', offset, limit)
  if #ids_and_scores > 0 then add(set, ids_and_scores) end
  offset = #ids_and_scores > 0 and 0 or math.max(0, offset - redis.call('ZCOUNT', set, from, to))
  limit = limit - #ids_and_scores / 2
end

if state ~= 'delayed' then list_from(leased) end
if state ~= 'leased' then
  for _, where in ipairs(used_sets()) do list_from(waiting[where]) end
end
return counts and {count, state == 'ready' and count_expired(now) or 0} or reply
