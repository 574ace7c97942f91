-- release_call: return the messages of a claim whose answer was lost, and keep it from handing out
-- any if it has not arrived yet.
--
-- Keys:
--   messages  see include/queue.lua
--   wake      CHANNEL  where a new head is announced: its due time, microseconds
--   settings  HASH     see include/settings.lua
--   call  STRING   number of this client's last claim, and the token of its leases
-- Arguments:
--   number  int  of the claim
-- Roles: consumer
-- Repeatable: yes
--
-- Returns the number of messages.
-- include: clock
-- include: leases
-- include: groups
-- include: settle
-- include: queue

local now, ids = now_us(), {}
local last_number, token = string.match(redis.call('GET', call) or '', '^(%d+) ?(%d*)$')
-- A later claim means that this call was repeated, and answered.
if number_or(0, last_number) > tonumber(number) then return 0 end
if last_number == number and token ~= '' then
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', leased, token, token)) do
    if lease_end(id, token) then ids[#ids + 1] = id end
  end
end
check_messages()
-- First a write that takes no memory: then a full server accepts the rest.
redis.call('PEXPIRE', call, 120000)
for _, id in ipairs(ids) do give_back(id, now) end
redis.call('SET', call, number, 'PX', 120000)
return #ids
