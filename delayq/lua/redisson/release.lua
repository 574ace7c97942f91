-- release: return leased messages that were not touched to the head of the ready list.
--
-- Keys:
--   ready    LIST  payloads that are due
--   timeout  ZSET  records, scored by due time, ms
--   ordered  LIST  the same records in offer order
--   leases   ZSET  tokens of the leases, scored by the end of the lease, ms
--   leased   HASH  token to the leased messages: see include/lease.lua
-- Arguments:
--   token...  text  of each payload, in the order in which they are to be taken again
-- Roles: consumer
-- Repeatable: yes
--
-- Returns the number of messages that were still leased.
-- include: lease

redis.call('LLEN', ready)
redis.call('HLEN', leased)
return end_leases(tokens)
