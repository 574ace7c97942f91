-- ack: delete leased messages that have been handled.
--
-- Keys:
--   leases  ZSET  tokens of the leases, scored by the end of the lease, ms
--   leased  HASH  token to payload
-- Arguments:
--   token...  text  of each payload
-- Roles: consumer, admin
-- Repeatable: no
--
-- Returns for each token: 1, or 0 if nothing is leased under it any more.

-- Read first, because a key of a foreign type must fail here.
local ends = redis.call('ZMSCORE', leases, unpack(tokens))
-- Even if an earlier try has removed only the entry: otherwise the field would be left for good.
redis.call('HDEL', leased, unpack(tokens))
redis.call('ZREM', leases, unpack(tokens))
local reply = {}
for i = 1, #tokens do reply[i] = ends[i] and 1 or 0 end
return reply
