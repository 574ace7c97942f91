-- summon: call dormant clients, because more payloads are ready than those that listen can take.
--
-- Keys:
--   ready    LIST     payloads that are due
--   summons  CHANNEL  where dormant clients listen: how many of them are needed; and STRING of that
--                     name, see include/summons.lua
-- Arguments:
--   share    int  how many payloads one client takes
--   at_hand  int  how many clients can take them without being called
-- Roles: consumer
-- Repeatable: yes
--
-- Returns how many clients were told.
-- include: summons

local needed = math.ceil(redis.call('LLEN', ready) / tonumber(share))
return give_summons(needed - tonumber(at_hand))
