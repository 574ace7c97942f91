-- set_aside: put a payload that a client cannot read at the end of quarantine. Running it again
-- changes nothing.
--
-- Keys:
--   quarantine  LIST    records and payloads that cannot be read
--   leases      ZSET    tokens of the leases, scored by the end of the lease, ms
--   leased      HASH    token to payload
--   fence       STRING  exists once this was done
-- Arguments:
--   fence_ms  int    how long a late first try of this call is kept from doing anything
--   token     text   of its lease, which ends; empty if it has none
--   payload   bytes  the payload
-- Roles: consumer, admin
-- Repeatable: yes
--
-- Returns 1; 0 if an earlier try had done so, or if the lease had ended: then the payload went
-- back, and another client reads it.
-- include: lease

-- Reads come first: a key of a foreign type must fail here, before anything is moved.
redis.call('LLEN', quarantine)
redis.call('HLEN', leased)
if redis.call('EXISTS', fence) == 1 then return 0 end
if token ~= '' and not redis.call('ZSCORE', leases, token) then return 0 end
demand_ends()
-- This changes nothing, because there is no fence: it tells whether there may be one.
redis.call('SET', fence, '', 'PX', fence_ms, 'XX')
redis.call('RPUSH', quarantine, payload)
-- Last, so that nothing is lost if a write before is refused.
redis.call('ZREM', leases, token)
redis.call('HDEL', leased, token)
redis.call('SET', fence, '', 'PX', fence_ms)
return 1
