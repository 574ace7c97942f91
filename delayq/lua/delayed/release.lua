-- release: return leased messages that were not touched to the head of the ready list.
--
-- KEYS[1]  ready    LIST  payloads that are due
-- KEYS[2]  timeout  ZSET  records, scored by due time, ms
-- KEYS[3]  ordered  LIST  the same records in offer order
-- KEYS[4]  leases   ZSET  tokens of what is out, scored by the end of their lease, ms
-- KEYS[5]  leased   HASH  token to payload
-- ARGV[...]  token  each names one payload, in the order in which they shall be taken again
--
-- Returns how many were still out.
-- include: lease

redis.call('LLEN', KEYS[1])
redis.call('HLEN', KEYS[5])
return take_back(KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], ARGV)
