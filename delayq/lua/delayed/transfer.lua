-- transfer: move what is due to the ready list, and hand the first of it to the caller.
--
-- KEYS[1]  ready       LIST  payloads that are due
-- KEYS[2]  timeout     ZSET  records, scored by due time, ms
-- KEYS[3]  ordered     LIST  the same records in offer order
-- KEYS[4]  quarantine  LIST  records that nobody can read
-- KEYS[5]  taken       LIST  what this call hands out, kept until the caller says that the answer has come
-- ARGV[1]  limit       int   move at most this many: a script blocks the whole server while it runs
-- ARGV[2]  take        int   hand at most this many ready payloads to the caller, who then owns them
-- ARGV[3]  keep_ms     int   how long what is handed out is kept at most
--
-- Returns {now_us, wait_us, moved, quarantined, payloads}. wait_us is the time until the next one is due: 0 when
-- it is already, -1 when there is none.
-- include: clock
-- include: record
-- include: forget

local now = now_us()
local limit, take = tonumber(ARGV[1]), tonumber(ARGV[2])

-- Reads first: a key of a foreign type must fail here, before anything is moved.
local waiting = redis.call('LLEN', KEYS[1])
redis.call('LLEN', KEYS[3])
redis.call('LLEN', KEYS[4])
-- The caller has given this call up already: see recover.
if take > 0 and redis.call('EXISTS', KEYS[5]) == 1 then take = 0 end

-- From -inf, or a foreign negative score would stay the head for ever.
local due = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', (now - now % 1000) / 1000), 'LIMIT', 0, limit)
local payloads, poison = {}, {}
if #due > 0 then
  -- The first write frees memory: then a server that is full lets the rest of the script through.
  redis.call('ZREMRANGEBYRANK', KEYS[2], 0, #due - 1)
  for _, record in ipairs(due) do
    local payload = payload_of(record)
    if payload then payloads[#payloads + 1] = payload else poison[#poison + 1] = record end
  end
  forget_all(KEYS[3], due, now)
end

local taken = {}
local first = 1
if take > 0 and waiting == 0 then
  -- Nothing is ahead of these: hand them over without the detour through the list.
  while first <= take and payloads[first] do
    taken[first] = payloads[first]
    first = first + 1
  end
end
if first <= #payloads then redis.call('RPUSH', KEYS[1], unpack(payloads, first)) end
if #poison > 0 then redis.call('RPUSH', KEYS[4], unpack(poison)) end
if take > 0 and waiting > 0 then taken = redis.call('LPOP', KEYS[1], take) end
if #taken > 0 then
  redis.call('RPUSH', KEYS[5], unpack(taken))
  redis.call('PEXPIRE', KEYS[5], ARGV[3])
end

return {now, wait_us(KEYS[2], now), #due, #poison, taken}
