-- activity: read the counts of the last minutes or hours.
--
-- Keys:
--   history  HASH  field of a minute or an hour to its number and counts
-- Arguments:
--   unit  text  "m" for minutes, "h" for hours
--   span  int   how many of them, up to 1440
-- Roles: admin, dashboard
-- Repeatable: yes
--
-- Returns {now_us, then the number and counts of each, the oldest first}; only the number if nothing
-- happened.
-- include: clock
-- include: history

local now = now_us()
local fields, numbers = {}, {}
for ago = tonumber(span) - 1, 0, -1 do
  fields[#fields + 1], numbers[#numbers + 1] = field_of(unit, now, ago)
end
local reply = {now}
for at, stored in ipairs(redis.call('HMGET', history, unpack(fields))) do
  local number = numbers[at]
  reply[#reply + 1] = stored and string.match(stored, '^%d+') == number and stored or number
end
return reply
