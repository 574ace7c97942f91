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
redis.call('ZSCORE', leases, '')
-- Even if an earlier try has removed only the entry: otherwise the field would be left for good.
redis.call('HDEL', leased, unpack(tokens))
local reply = {}
for i, token in ipairs(tokens) do reply[i] = redis.call('ZREM', leases, token) end
return reply
