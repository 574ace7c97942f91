-- read_records: return the records of messages.
--
-- Keys:
--   settings  HASH  see include/settings.lua
--   records   HASH  of include/records.lua
-- Arguments:
--   id...  text  of each message
-- Roles: producer, consumer, admin, dashboard
-- Repeatable: yes
--
-- Returns the record of each message; false if there is none.
-- include: at_rest

return redis.call('HMGET', records, unpack(ids))
