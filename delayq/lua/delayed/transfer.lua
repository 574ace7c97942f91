-- transfer: move due messages to the ready list, and hand the first of them to the caller under a lease.
--
-- KEYS[1]  ready       LIST    payloads that are due
-- KEYS[2]  timeout     ZSET    records, scored by due time, ms
-- KEYS[3]  ordered     LIST    the same records in offer order
-- KEYS[4]  quarantine  LIST    records that cannot be read
-- KEYS[5]  fence       STRING  exists if the caller has given this call up: then it hands out nothing
-- KEYS[6]  leases      ZSET    tokens of what is out under a lease, scored by its end, ms
-- KEYS[7]  leased      HASH    token to what it stands for: see include/lease.lua
-- KEYS[8]  turns       CHANNEL  where other clients are told that they need not look
-- ARGV[1]  limit       int   move at most this many: a script blocks the whole server while it runs
-- ARGV[2]  take        int   hand at most this many ready payloads to the caller
-- ARGV[3]  most_bytes  int   and none beyond this many bytes but the first: an answer has to cross a slow network in reasonable time
-- ARGV[4]  lease_us    int   how long the caller has what is handed out
-- ARGV[5]  each        0 or 1  whether each payload has a lease of its own; or else all have one, which ends as soon as the caller
--                      confirms that the answer has come
-- ARGV[6]  call        text  the caller's name for this call: the token of its one lease, or the tokens are call:001, call:002, ...
-- ARGV[7]  signature   text  published behind when the next one is due, and now, if all that was due was moved; empty: not
--
-- Returns {now_us, wait_us, moved, quarantined, returned, left, listeners, payloads}. wait_us is the time until the next one is
-- due or the next lease ends: 0 when it is so already, -1 when there is none. returned: payloads whose lease had ended. left: how
-- many are on the ready list. listeners: how many heard the notice, 0 where there was none, -1 where the user may not publish it.
-- include: clock
-- include: notice
-- include: record
-- include: forget
-- include: lease

local PAGE = 25

local now = now_us()
local now_ms = string.format('%.0f', (now - now % 1000) / 1000)
local limit, take, most_bytes, lease, each = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == '1'

-- Reads come first: a key of a foreign type must fail here, before anything is moved.
local waiting = redis.call('LLEN', KEYS[1])
redis.call('LLEN', KEYS[3])
redis.call('LLEN', KEYS[4])
redis.call('HLEN', KEYS[7])
if take > 0 and redis.call('EXISTS', KEYS[5]) == 1 then take = 0 end

-- From -inf, because a foreign negative score would stay the head forever otherwise.
local ended = redis.call('ZRANGEBYSCORE', KEYS[6], '-inf', now_ms, 'LIMIT', 0, limit)
local due = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now_ms, 'LIMIT', 0, limit)
local returned = take_back(KEYS[1], KEYS[2], KEYS[3], KEYS[6], KEYS[7], ended)
waiting = waiting + returned
local payloads, poison = {}, {}
if #due > 0 then
  -- The first write frees memory: then a full server accepts the rest of the script.
  redis.call('ZREMRANGEBYRANK', KEYS[2], 0, #due - 1)
  for _, record in ipairs(due) do
    local payload = payload_of(record)
    if payload then payloads[#payloads + 1] = payload else poison[#poison + 1] = record end
  end
  forget_all(KEYS[3], due, now)
end

local taken, bytes = {}, 0
-- Hand out the payloads that fit, and return the place of the first one that does not.
local function hand_out(some)
  for i, payload in ipairs(some) do
    if #taken == take or (#taken > 0 and bytes + #payload > most_bytes) then return i end
    taken[#taken + 1], bytes = payload, bytes + #payload
  end
  return #some + 1
end

-- If nothing is ahead of them, due messages are handed over without the detour through the list.
local first = take > 0 and waiting == 0 and hand_out(payloads) or 1
if first <= #payloads then redis.call('RPUSH', KEYS[1], unpack(payloads, first)) end
if #poison > 0 then redis.call('RPUSH', KEYS[4], unpack(poison)) end
while waiting > 0 and #taken < take do
  local some = redis.call('LPOP', KEYS[1], math.min(PAGE, take - #taken))
  if not some then break end
  first = hand_out(some)
  for i = #some, first, -1 do redis.call('LPUSH', KEYS[1], some[i]) end
  if first <= #some then break end
end

-- The caller wakes for the end of other leases. Its own lease for the call ends with the answer.
local wait = sooner(wait_us(KEYS[2], now, 1000), wait_us(KEYS[6], now, 1000))
if #taken > 0 then
  local ends = due_ms(now, lease)
  if each then
    wait = sooner(wait, math.max(0, ends * 1000 - now))
    for i, payload in ipairs(taken) do hold(KEYS[6], KEYS[7], token_of(ARGV[6], i), ends, payload) end
  else
    hold(KEYS[6], KEYS[7], ARGV[6], ends, pack(taken))
  end
end

-- Another message that is due in this very millisecond may still be offered.
local listeners = #due > 0 and give_notice(KEYS[8], now, wait, now - now % 1000, ARGV[7]) or 0
return {now, wait, #due, #poison, returned, redis.call('LLEN', KEYS[1]), listeners, taken}
