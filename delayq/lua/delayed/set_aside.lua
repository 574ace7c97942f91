-- set_aside: put a payload that a client cannot read at the end of quarantine. Running it again changes nothing.
--
-- KEYS[1]  quarantine  LIST    records and payloads that cannot be read
-- KEYS[2]  leases      ZSET    tokens of what is out under a lease, scored by its end, ms
-- KEYS[3]  leased      HASH    token to payload
-- KEYS[4]  fence       STRING  says that this was done
-- ARGV[1]  fence_ms  int    how long a late first try of this call is kept from doing anything
-- ARGV[2]  token     text   the token of its lease, which ends; empty where it has none
-- ARGV[3]  payload   bytes  the payload
--
-- Returns 1; 0 when an earlier try had done so, or the lease had ended: then the payload went back, and is another client's to read.

-- Reads come first: a key of a foreign type must fail here, before anything is moved.
redis.call('LLEN', KEYS[1])
redis.call('HLEN', KEYS[3])
if redis.call('EXISTS', KEYS[4]) == 1 then return 0 end
-- First the write that frees memory: then a full server accepts the rest.
if redis.call('ZREM', KEYS[2], ARGV[2]) == 0 and ARGV[2] ~= '' then return 0 end
redis.call('HDEL', KEYS[3], ARGV[2])
redis.call('SET', KEYS[4], '', 'PX', ARGV[1])
redis.call('RPUSH', KEYS[1], ARGV[3])
return 1
