-- ack: delete leased messages that have been handled.
--
-- KEYS[1]  leases  ZSET  tokens of what is out, scored by the end of their lease, ms
-- KEYS[2]  leased  HASH  token to payload
-- ARGV[...]  token  each names one payload that was handed out
--
-- Returns 1 or 0 for each: 0 when it is not out under that token any more.

-- Read first, because a key of a foreign type must fail here.
redis.call('ZSCORE', KEYS[1], '')
-- Even if an earlier try has removed only the entry: otherwise the field would be left for good.
redis.call('HDEL', KEYS[2], unpack(ARGV))
local reply = {}
for i, token in ipairs(ARGV) do reply[i] = redis.call('ZREM', KEYS[1], token) end
return reply
