-- transfer: move due messages to the ready list, and hand the first of them to the caller under a
-- lease.
--
-- Keys:
--   ready       LIST     payloads that are due
--   timeout     ZSET     records, scored by due time, ms
--   ordered     LIST     the same records in offer order
--   quarantine  LIST     records that cannot be read
--   fence       STRING   exists if the caller has given this call up: then it hands out nothing
--   leases      ZSET     tokens of the leases, scored by the end of the lease, ms
--   leased      HASH     token to the leased messages: see include/lease.lua
--   turns       CHANNEL  where other clients are told that they need not look
-- Arguments:
--   limit       int     move at most this many: a script blocks the whole server while it runs
--   take        int     hand at most this many ready payloads to the caller
--   most_bytes  int     and none beyond this many bytes except the first: a reply has to cross a
--                       slow network in reasonable time
--   lease_us    int     how long the caller holds the payloads
--   each        0 or 1  whether each payload has a lease of its own; otherwise all have one, which
--                       ends as soon as the caller confirms that the reply has come
--   call        text    the caller's name for this call: the token of its one lease, or the tokens
--                       are call:001, call:002, ...
--   signature   text    of the caller. If all due messages were moved, it is published behind the
--                       due time of the next one, and now; empty: it is not
-- Roles: consumer
-- Repeatable: no
-- Undone by: give_back
--
-- Returns {now_us, wait_us, moved, quarantined, returned, left, listeners, payloads}. wait_us: the
-- time until the next message is due or the next lease ends; 0 if one already is, -1 if there is
-- none. returned: payloads whose lease had ended. left: the length of the ready list. listeners:
-- the number of clients that got the notice; 0 if there was none, -1 if the user may not publish
-- it.
-- include: clock
-- include: notice
-- include: record
-- include: forget
-- include: lease

local PAGE = 25

local now = now_us()
local now_ms = string.format('%.0f', (now - now % 1000) / 1000)
limit, take, most_bytes, lease_us = tonumber(limit), tonumber(take), tonumber(most_bytes), tonumber(lease_us)

-- Reads come first: a key of a foreign type must fail here, before anything is moved.
local waiting = redis.call('LLEN', ready)
redis.call('LLEN', ordered)
redis.call('LLEN', quarantine)
redis.call('HLEN', leased)
if take > 0 and redis.call('EXISTS', fence) == 1 then take = 0 end

-- From -inf, because a foreign negative score would stay the head forever otherwise.
local ended = redis.call('ZRANGEBYSCORE', leases, '-inf', now_ms, 'LIMIT', 0, limit)
local due = redis.call('ZRANGEBYSCORE', timeout, '-inf', now_ms, 'LIMIT', 0, limit)
-- The caller wakes for the end of other leases. Its own lease for the call ends with the reply.
local wait = shorter_wait(wait_us(timeout, now, 1000, #due), wait_us(leases, now, 1000, #ended))
local returned = end_leases(ended)
if returned > 0 then
  wait = 0
  -- Some of those may be pending again, and due before the others.
  due = redis.call('ZRANGEBYSCORE', timeout, '-inf', now_ms, 'LIMIT', 0, limit)
end
waiting = waiting + returned
local payloads, unreadable = {}, {}
for _, record in ipairs(due) do
  local payload = payload_of(record)
  if payload then payloads[#payloads + 1] = payload else unreadable[#unreadable + 1] = record end
end

local taken, bytes = {}, 0
-- Hand out the payloads that fit, and return the index of the first one that does not.
local function hand_out(some)
  for i, payload in ipairs(some) do
    if #taken == take or (#taken > 0 and bytes + #payload > most_bytes) then return i end
    taken[#taken + 1], bytes = payload, bytes + #payload
  end
  return #some + 1
end

-- Due messages are handed over without the detour through the list, once nothing is ahead of them.
local from_list, is_full = 0, take == 0
while from_list < waiting and not is_full do
  local some = redis.call('LRANGE', ready, from_list, from_list + math.min(PAGE, take - #taken) - 1)
  if #some == 0 then break end
  local stop = hand_out(some)
  from_list, is_full = from_list + stop - 1, stop <= #some or #taken == take
end
local first = is_full and 1 or hand_out(payloads)

-- Until the last writes, which put nothing anywhere, each message is where it was: so none is lost if
-- a right has been taken away meanwhile. That they are permitted has to be known before.
if from_list > 0 then
  local reply = redis.pcall('LTRIM', ready, 'wrong', '')
  if not string.find(tostring(reply.err), 'integer') then return reply end
end
-- A full server accepts all writes after one that takes no memory.
if #due > 0 or from_list > 0 then redis.call('ZREMRANGEBYRANK', timeout, 1, 0) end
if #due > 0 then remove_from_list(due, now) end
local tokens = {call}
if #taken > 0 then
  local ends = due_ms(now, lease_us)
  if each == '1' then
    wait = shorter_wait(wait, math.max(0, ends * 1000 - now))
    for i = 1, #taken do tokens[i] = numbered_token(call, i) end
    add_leases(tokens, ends, taken)
  else
    add_leases(tokens, ends, {pack_parts(taken)})
  end
end
local pushed
if first <= #payloads then pushed = redis.pcall('RPUSH', ready, unpack(payloads, first)) end
if #unreadable > 0 and type(pushed) ~= 'table' then pushed = redis.pcall('RPUSH', quarantine, unpack(unreadable)) end
if type(pushed) == 'table' then
  redis.call('ZREM', leases, unpack(tokens))
  redis.call('HDEL', leased, unpack(tokens))
  return pushed
end
if from_list > 0 then redis.call('LTRIM', ready, from_list, -1) end
if #due > 0 then redis.call('ZREMRANGEBYRANK', timeout, 0, #due - 1) end

-- Another message that is due in this very millisecond may still be offered.
local listeners = #due > 0 and give_notice(turns, now, wait, now - now % 1000, signature) or 0
return {now, wait, #due, #unreadable, returned, redis.call('LLEN', ready), listeners, taken}
