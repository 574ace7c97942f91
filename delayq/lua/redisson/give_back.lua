-- give_back: put undelivered messages back where they were. Running it again changes nothing.
--
-- Keys:
--   ready    LIST    payloads that are due
--   timeout  ZSET    records, scored by due time, ms
--   ordered  LIST    the same records in offer order
--   leases   ZSET    tokens of the leases, scored by the end of the lease, ms
--   leased   HASH    token to the leased messages: see include/lease.lua
--   fence    STRING  exists once this was done
-- Arguments:
--   fence_ms    int    how long a late first try of this call, or of the call that is given up, is
--                      kept from doing anything
--   call        text   the name of the call that is given up, as it was given to the script; its
--                      leases end
--   places      int    the most leases that this call may have made, one for each payload; 0: one
--                      for all
--   payload...  bytes  those that the client has, in the order in which they are to be taken again
-- Roles: consumer, admin
-- Repeatable: yes
--
-- Returns the number of messages that went back; 0 if an earlier try had done so.
-- include: lease

-- Reads come first: a key of a foreign type must fail here, before anything is moved.
redis.call('LLEN', ready)
redis.call('ZSCORE', timeout, '')
redis.call('LLEN', ordered)
redis.call('ZSCORE', leases, '')
redis.call('HLEN', leased)
if redis.call('EXISTS', fence) == 1 then return 0 end
demand_ends()
-- This changes nothing, because there is no fence: it tells whether there may be one.
redis.call('SET', fence, '', 'PX', fence_ms, 'XX')
local tokens = {call}
for number = 1, tonumber(places) do tokens[number] = numbered_token(call, number) end
local count = end_leases(tokens)
for i = #payloads, 1, -1 do redis.call('LPUSH', ready, payloads[i]) end
-- Last, so that nothing is lost if a write before is refused.
redis.call('SET', fence, '', 'PX', fence_ms)
return count + #payloads
