-- give_back: put undelivered messages back where they were. Running it again changes nothing.
--
-- KEYS[1]  ready    LIST    payloads that are due
-- KEYS[2]  timeout  ZSET    records, scored by due time, ms
-- KEYS[3]  ordered  LIST    the same records in offer order
-- KEYS[4]  leases   ZSET    tokens of what is out under a lease, scored by its end, ms
-- KEYS[5]  leased   HASH    token to what it stands for: see include/lease.lua
-- KEYS[6]  fence    STRING  says that this was done
-- ARGV[1]  fence_ms  int   how long a late first try of this call, or of the call that is given up, is kept from doing anything
-- ARGV[2]  call      text  the name of the call that is given up, as it was given to the script; its leases end
-- ARGV[3]  places    int   how many leases that call may have made, one for each payload; 0: one for all
-- ARGV[...]  payload  what a client has here, in the order in which it shall be taken again
--
-- Returns how many messages went back; 0 when an earlier try had done so.
-- include: lease

-- Reads come first: a key of a foreign type must fail here, before anything is moved.
redis.call('LLEN', KEYS[1])
redis.call('ZSCORE', KEYS[2], '')
redis.call('LLEN', KEYS[3])
redis.call('ZSCORE', KEYS[4], '')
redis.call('HLEN', KEYS[5])
if redis.call('EXISTS', KEYS[6]) == 1 then return 0 end
-- First the write that may free memory: then a full server accepts the rest.
redis.call('ZREM', KEYS[4], ARGV[2])
redis.call('SET', KEYS[6], '', 'PX', ARGV[1])
local tokens = {ARGV[2]}
for place = 1, tonumber(ARGV[3]) do tokens[place] = token_of(ARGV[2], place) end
local count = take_back(KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], tokens)
for i = #ARGV, 4, -1 do redis.call('LPUSH', KEYS[1], ARGV[i]) end
return count + #ARGV - 3
