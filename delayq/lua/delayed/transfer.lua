-- transfer: move what is due to the ready list, and hand the first of it to the caller, for good or under a lease.
--
-- KEYS[1]  ready       LIST  payloads that are due
-- KEYS[2]  timeout     ZSET  records, scored by due time, ms
-- KEYS[3]  ordered     LIST  the same records in offer order
-- KEYS[4]  quarantine  LIST  records that nobody can read
-- KEYS[5]  taken       LIST  what this call hands out for good, kept until the caller says that the answer has come
-- KEYS[6]  leases      ZSET  tokens of what is out under a lease, scored by its end, ms
-- KEYS[7]  leased      HASH  token to payload
-- KEYS[8]  turns       CHANNEL  where other clients are told that they need not look
-- ARGV[1]  limit       int   move at most this many: a script blocks the whole server while it runs
-- ARGV[2]  take        int   hand at most this many ready payloads to the caller
-- ARGV[3]  keep_ms     int   how long what is handed out for good is kept at most
-- ARGV[4]  lease_us    int   how long the caller has what is handed out; 0: for good
-- ARGV[5]  call        text  the caller's name for this call: the tokens of its leases are call:001, call:002, ...
-- ARGV[6]  signature   text  published behind when the next one is due, and now, if all that was due was moved; empty: not
--
-- Returns {now_us, wait_us, moved, quarantined, returned, left, listeners, payloads}. wait_us is the time until the next one is
-- due or the next lease ends: 0 when it is so already, -1 when there is none. returned: so many leases had ended. left: so many
-- are on the ready list. listeners: so many heard the notice, 0 where there was none, -1
-- where the user may not publish it.
-- include: clock
-- include: notice
-- include: record
-- include: forget
-- include: lease

local now = now_us()
local now_ms = string.format('%.0f', (now - now % 1000) / 1000)
local limit, take, lease = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[4])

-- Reads first: a key of a foreign type must fail here, before anything is moved.
local waiting = redis.call('LLEN', KEYS[1])
redis.call('LLEN', KEYS[3])
redis.call('LLEN', KEYS[4])
redis.call('HLEN', KEYS[7])
-- The caller has given this call up already: see recover.
if take > 0 and lease == 0 and redis.call('EXISTS', KEYS[5]) == 1 then take = 0 end

-- From -inf, or a foreign negative score would stay the head for ever.
local ended = redis.call('ZRANGEBYSCORE', KEYS[6], '-inf', now_ms, 'LIMIT', 0, limit)
local due = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now_ms, 'LIMIT', 0, limit)
waiting = waiting + take_back(KEYS[1], KEYS[6], KEYS[7], ended)
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
if #taken > 0 and lease == 0 then
  redis.call('RPUSH', KEYS[5], unpack(taken))
  redis.call('PEXPIRE', KEYS[5], ARGV[3])
elseif #taken > 0 then
  local ends = string.format('%.0f', due_ms(now, lease))
  for i, payload in ipairs(taken) do
    local token = string.format('%s:%03d', ARGV[5], i)
    redis.call('ZADD', KEYS[6], ends, token)
    redis.call('HSET', KEYS[7], token, payload)
  end
end

local wait = sooner(wait_us(KEYS[2], now, 1000), wait_us(KEYS[6], now, 1000))
-- One that is due in this very millisecond may be offered yet.
local listeners = #due > 0 and give_notice(KEYS[8], now, wait, now - now % 1000, ARGV[6]) or 0
return {now, wait, #due, #poison, #ended, redis.call('LLEN', KEYS[1]), listeners, taken}
