-- extend: make leases end later, or earlier.
--
-- Keys:
--   leases  ZSET  tokens of the leases, scored by the end of the lease, ms
-- Arguments:
--   lease_us  int   time from now, microseconds
--   token...  text  of each payload
-- Roles: consumer
-- Repeatable: yes
--
-- Returns {ends_ms, held, held, ...}: the new end, and for each token 1, or 0 if nothing is leased
-- under it any more.
-- include: clock

local ends = due_ms(now_us(), tonumber(lease_us))
local reply = {ends}
for i, token in ipairs(tokens) do
  local is_held = redis.call('ZSCORE', leases, token)
  reply[i + 1] = is_held and 1 or 0
  if is_held then redis.call('ZADD', leases, 'XX', string.format('%.0f', ends), token) end
end
return reply
