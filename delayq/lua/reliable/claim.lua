-- claim: hand due messages to a worker, under a lease.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  paused         STRING  exists while no client may take anything
-- KEYS[18]  dead           ZSET    names of dead letters, scored by when they died, microseconds
-- KEYS[19]  dead_messages  HASH    name to why, as JSON, newline, body: see include/letters.lua
-- KEYS[20]  wake           CHANNEL where other clients are told that they need not look
-- ARGV[1]  limit         int   hand out at most this many
-- ARGV[2]  lease_us      int   how long the worker has them
-- ARGV[3]  token         text  names the lease: it is needed to settle a message
-- ARGV[4]  max_attempts  int   a message that has used this many dies instead; 0: no limit
-- ARGV[5]  expired       text  what happens to a message past its time to live: "drop" or "dead"
-- ARGV[6]  signature     text  published behind when the next one is due, and now, if all that is due was handed out; empty: not
-- ARGV[7]  suspects      int   1: the client may have a suspect; 0: it has one at work, or asks for one elsewhere
-- ARGV[8]  held_id       text  the suspect of this queue that it has at work: if its lease is over it may have another; or empty
-- ARGV[9]  held_token    text  of that lease
-- ARGV[10]  company  int  1: the client has other messages of this queue at hand
--
-- Returns {now_us, wait_us, expired, died, listeners, {id, priority, attempt, due, body, ...}, suspect, more, {id, ...}}. wait_us
-- is the time until the next one is due or the next lease ends, suspects apart: 0 when that is now, -1 when there is none or the
-- queue is paused. listeners: how many heard the notice, 0 where there was none, -1 where the user may not publish it. An attempt
-- is a number, or one and how many are forgiven as "3-1". suspect: 1 when the message handed out is one, and thus alone. more: 1
-- when suspects wait that were not handed out. The last ids are of recurring messages that were dropped or died.
-- include: clock
-- include: notice
-- include: queue
-- include: letters

local now = now_us()
if redis.call('EXISTS', KEYS[17]) == 1 then return {now, -1, 0, 0, 0, {}, 0, 0, {}} end
local limit, lease_us, max_attempts = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[4])
-- The bodies of one answer have to cross a network before the first message can be handled, so those after the first are bounded.
local room = 262144
-- Messages that are gone make room for more, but not without end.
local look_at = limit + 400

local may_have_suspect = ARGV[7] == '1'
if ARGV[8] ~= '' then
  local _, score = locate(ARGV[8])
  may_have_suspect = not holds(redis.call('HGET', KEYS[12], ARGV[8]), ARGV[9]) or not score or score <= now
end

-- The changes are collected: a script is refused before its first write, or does its work.
local reply, ids, handed_out, suspect, full = {}, {}, 0, 0, false
local placed, gone, deaths, occurrences = {}, {}, {}, {}
-- For the few messages that have attempts forgiven: their attempts.
local used_of, forgiven_by = {}, {}
local expired, died = 0, 0

-- Most messages have no earlier attempts and no expiry: then there is nothing to look up.
local none = {}
local some_tried = redis.call('EXISTS', KEYS[13]) == 1
local some_expire = redis.call('EXISTS', KEYS[14]) == 1
local some_leased = redis.call('EXISTS', KEYS[12]) == 1
-- The ends of their leases lie a quarter of a microsecond apart, so that they keep their order. Four of them share the digits
-- before the point, because turning numbers into text costs most here.
local ends, quarters, whole = now + lease_us, {[0] = '.00', '.25', '.50', '.75'}, nil

local function put(at, score, id)
  local set = placed[at]
  if not set then
    set = {}
    placed[at] = set
  end
  set[#set + 1], set[#set + 2] = score, id
end

local function drop(at, id, used, reason, body)
  gone[at] = gone[at] or {}
  table.insert(gone[at], id)
  if string.find(id, '@%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d$') then occurrences[#occurrences + 1] = id end
  if reason then deaths[#deaths + 1] = {id, at - 1, used, reason, body} end
end

local function hand_out(at, id, used, forgiven, was_due, body)
  local quarter, base = handed_out % 4, handed_out * 5
  if quarter == 0 then whole = string.format('%.0f', ends + handed_out / 4) end
  put(at, whole .. quarters[quarter], id)
  handed_out = handed_out + 1
  ids[handed_out] = id
  reply[base + 1], reply[base + 2], reply[base + 3], reply[base + 4], reply[base + 5] = id, at - 1, used, was_due, body
  if forgiven > 0 then
    used_of[handed_out], forgiven_by[handed_out] = used, forgiven
    reply[base + 3] = tries(used, forgiven)
  end
  limit, room = limit - 1, room - (handed_out > 1 and #body or 0)
end

-- Look at the due messages of a set, or at its suspects, in order.
local function look(at, suspects)
  -- Of suspects, one is enough.
  local offset, most, before = 0, suspects and 5 or 200, nil
  while limit > 0 and look_at > 0 and suspect == 0 and not full do
    -- If some were gone, more may be: then look at more than are wanted.
    local count, due = math.min(before == limit and 200 or limit, look_at, most), nil
    before = limit
    if suspects then
      due = redis.call('ZRANGE', KEYS[at], '(0', '-inf', 'BYSCORE', 'REV', 'LIMIT', offset, count, 'WITHSCORES')
    else
      due = redis.call('ZRANGEBYSCORE', KEYS[at], 0, number(now), 'WITHSCORES', 'LIMIT', offset, count)
    end
    if #due == 0 then return end
    local many = #due / 2
    if many > 1 then
      -- If bodies are large, do not read those that would not leave anyway.
      local size = redis.call('HSTRLEN', KEYS[11], due[1])
      if size * many > room then many = math.max(1, math.floor(room / size)) end
    end
    local some = {}
    for i = 1, many do some[i] = due[i * 2 - 1] end
    local bodies = redis.call('HMGET', KEYS[11], unpack(some))
    local leases = some_leased and redis.call('HMGET', KEYS[12], unpack(some)) or none
    local attempts = some_tried and redis.call('HMGET', KEYS[13], unpack(some)) or none
    local expiries = some_expire and redis.call('HMGET', KEYS[14], unpack(some)) or none
    for i = 1, many do
      if limit == 0 then break end
      local id, body = some[i], bodies[i]
      local lease = leases[i] and lease_of(leases[i])
      local used, forgiven, was_due = 0, 0, due[i * 2]
      if lease then
        used, forgiven, was_due = lease.attempt, forgiven_of(lease), number(lease.due)
      elseif attempts[i] then
        used, forgiven = tries_of(attempts[i])
      end
      if suspects and not lease then was_due = number(math.min(now, -tonumber(due[i * 2]))) end
      if not body then
        drop(at, id)
      elseif expiries[i] and finite(expiries[i], MOST) < now then
        drop(at, id, used, ARGV[5] == 'dead' and 'expired', body)
        expired = expired + 1
      elseif max_attempts > 0 and used - forgiven >= max_attempts then
        drop(at, id, used, 'attempts', body)
        died = died + 1
      elseif lease and not suspects and (handed_out > 0 or not may_have_suspect) then
        put(at, number(-lease.due), id)
      elseif suspects and lease and handed_out > 0 then
        return
      elseif handed_out > 0 and #body > room then
        full = true
        break
      else
        hand_out(at, id, used + 1, forgiven, was_due, body)
        -- A score below 0 without a lease is a foreign writer's.
        if lease then
          suspect = 1
          break
        end
      end
    end
    look_at, offset = look_at - many, offset + many
  end
end

for _, at in ipairs(live_sets()) do
  if may_have_suspect and handed_out == 0 then look(at, true) end
  look(at, false)
end

if handed_out > 0 then
  -- First the write that frees memory: then a full server accepts the rest.
  redis.call('HDEL', KEYS[13], unpack(some_tried and ids or {ids[1]}))
end
for at, some in pairs(gone) do
  redis.call('ZREM', KEYS[at], unpack(some))
  -- Their errors are still needed below.
  for hash = 11, 16 do
    if hash ~= 15 then redis.call('HDEL', KEYS[hash], unpack(some)) end
  end
end
for _, death in ipairs(deaths) do
  local id, priority, used, reason, body = unpack(death)
  local why = {reason = reason, attempt = used, priority = priority, error = redis.call('HGET', KEYS[15], id) or nil}
  post(KEYS[18], KEYS[19], id, cjson.encode(why), body, now)
end
for _, some in pairs(gone) do redis.call('HDEL', KEYS[15], unpack(some)) end
for at, set in pairs(placed) do redis.call('ZADD', KEYS[at], unpack(set)) end
if handed_out > 0 then
  local mark = suspect == 1 and 's' or (handed_out > 1 or ARGV[10] == '1') and 'c' or 'a'
  local plain = mark == 'a' and ':' .. ARGV[3] or ':' .. mark .. '0:' .. ARGV[3]
  local leases = {}
  for i, id in ipairs(ids) do
    local used, was_due, behind = reply[i * 5 - 2], reply[i * 5 - 1], plain
    if forgiven_by[i] then used, behind = used_of[i], ':' .. mark .. forgiven_by[i] .. ':' .. ARGV[3] end
    leases[i * 2 - 1], leases[i * 2] = id, (used == 1 and '1:' or used .. ':') .. was_due .. behind
  end
  redis.call('HSET', KEYS[12], unpack(leases))
end
local wait, more = wait_of_all(now)
local listeners = handed_out > 0 and give_notice(KEYS[20], now, more and 0 or wait, now, ARGV[6]) or 0
return {now, wait, expired, died, listeners, reply, suspect, more and 1 or 0, occurrences}
