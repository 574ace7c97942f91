-- claim: hand messages that are due to a worker, under a lease.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  paused         STRING  there while nobody shall get anything
-- KEYS[18]  dead           ZSET    ids of dead letters, scored by when they died, microseconds
-- KEYS[19]  dead_messages  HASH    id to why, as JSON, newline, body
-- KEYS[20]  wake           CHANNEL where other clients are told that they need not look
-- ARGV[1]  limit         int   hand out at most so many
-- ARGV[2]  lease_us      int   how long the worker has them
-- ARGV[3]  token         text  names the lease: whoever settles a message must know it
-- ARGV[4]  max_attempts  int   a message that has used so many dies instead; 0: no end
-- ARGV[5]  expired       text  what happens to a message past its time to live: "drop" or "dead"
-- ARGV[6]  signature     text  published behind when the next one is due, and now, if all that is due was handed out; empty: not
--
-- Returns {now_us, wait_us, expired, died, listeners, {id, priority, attempt, due, body, ...}}. wait_us is the time until the
-- next one is due or the next lease ends: 0 when that is now, -1 when there is none or the queue is paused. listeners: so many
-- heard the notice, 0 where there was none, -1
-- where the user may not publish it.
-- include: clock
-- include: notice
-- include: queue

local now = now_us()
if redis.call('EXISTS', KEYS[17]) == 1 then return {now, -1, 0, 0, 0, {}} end
local limit, lease, max_attempts = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[4])
local ends, token = now + lease, ':' .. ARGV[3]
-- The ends of their leases lie a quarter of a microsecond apart, so that they keep their order: four share what precedes the
-- point, for making a text of a number is what costs most here.
local quarters, whole = {[0] = '.00', '.25', '.50', '.75'}, nil
local reply, handed_out = {}, 0
local expired, died = 0, 0

local function die(id, priority, attempt, reason, body)
  local why = {reason = reason, attempt = attempt, priority = priority, error = redis.call('HGET', KEYS[15], id) or nil}
  redis.call('HSET', KEYS[19], id, cjson.encode(why) .. '\n' .. body)
  redis.call('ZADD', KEYS[18], number(now), id)
end

-- What is gone makes room for more, but not without end.
local look_at = limit + 100
-- Most messages have no attempt behind them and no end: then there is nothing to look up.
local none = {}
local some_tried = redis.call('EXISTS', KEYS[13]) == 1
local some_expire = redis.call('EXISTS', KEYS[14]) == 1
local some_leased = redis.call('EXISTS', KEYS[12]) == 1

for _, at in ipairs(live_sets()) do
  while limit > 0 and look_at > 0 do
    local due = redis.call('ZRANGEBYSCORE', KEYS[at], '-inf', number(now), 'WITHSCORES', 'LIMIT', 0, math.min(limit, look_at))
    if #due == 0 then break end
    local ids = {}
    for i = 1, #due, 2 do ids[#ids + 1] = due[i] end
    local bodies = redis.call('HMGET', KEYS[11], unpack(ids))
    local leases = some_leased and redis.call('HMGET', KEYS[12], unpack(ids)) or none
    local attempts = some_tried and redis.call('HMGET', KEYS[13], unpack(ids)) or none
    local expiries = some_expire and redis.call('HMGET', KEYS[14], unpack(ids)) or none
    -- First what frees memory: then a server that is full takes the rest.
    redis.call('HDEL', KEYS[13], unpack(some_tried and ids or {ids[1]}))
    local scores, values, gone = {}, {}, {}
    for i = 1, #ids do
      local id = ids[i]
      local used, was_due = tonumber(attempts[i] or 0), due[i * 2]
      if leases[i] then used, was_due = lease_of(leases[i]); was_due = number(was_due) end
      if not bodies[i] then
        gone[#gone + 1] = id
      elseif expiries[i] and tonumber(expiries[i]) < now then
        if ARGV[5] == 'dead' then die(id, at - 1, used, 'expired', bodies[i]) end
        gone[#gone + 1], expired = id, expired + 1
      elseif max_attempts > 0 and used >= max_attempts then
        die(id, at - 1, used, 'attempts', bodies[i])
        gone[#gone + 1], died = id, died + 1
      else
        local place, quarter = #scores, handed_out % 4
        if quarter == 0 then whole = string.format('%.0f', ends + handed_out / 4) end
        used = used + 1
        scores[place + 1], scores[place + 2] = whole .. quarters[quarter], id
        values[place + 1], values[place + 2] = id, (used == 1 and '1:' or used .. ':') .. was_due .. token
        place = handed_out * 5
        reply[place + 1], reply[place + 2], reply[place + 3] = id, at - 1, used
        reply[place + 4], reply[place + 5] = was_due, bodies[i]
        handed_out = handed_out + 1
      end
    end
    if #gone > 0 then
      redis.call('ZREM', KEYS[at], unpack(gone))
      forget(gone)
    end
    if #scores > 0 then
      redis.call('ZADD', KEYS[at], unpack(scores))
      redis.call('HSET', KEYS[12], unpack(values))
    end
    limit, look_at = limit - #scores / 2, look_at - #ids
  end
end
local wait = wait_of_all(now)
return {now, wait, expired, died, handed_out > 0 and give_notice(KEYS[20], now, wait, now, ARGV[6]) or 0, reply}
