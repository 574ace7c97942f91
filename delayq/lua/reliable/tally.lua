-- tally: add what a client has done to the counts of this minute and this hour.
--
-- Keys:
--   history  HASH  field of a minute or an hour to its number and counts
-- Arguments:
--   counts  text  name=count, separated by blanks
-- Roles: producer, consumer
-- Repeatable: no
--
-- Returns the server's time, microseconds.
-- include: clock
-- include: history

local now = now_us()
local minute, minute_number = field_of('m', now, 0)
local hour, hour_number = field_of('h', now, 0)
local stored = redis.call('HMGET', history, minute, hour)

local function added(before, number)
  local names, sums = {}, {}
  local function add(text)
    for name, count in string.gmatch(text, '(%a%d*)=(%d+)') do
      if not sums[name] then names[#names + 1] = name end
      sums[name] = (sums[name] or 0) + tonumber(count)
    end
  end
  -- The field may still have what happened a day, or 30 days, ago.
  if before and string.match(before, '^%d+') == number then add(before) end
  add(counts)
  local parts = {number}
  for _, name in ipairs(names) do parts[#parts + 1] = string.format('%s=%.0f', name, sums[name]) end
  return table.concat(parts, ' ')
end

redis.call('HSET', history, minute, added(stored[1], minute_number), hour, added(stored[2], hour_number))
redis.call('PEXPIRE', history, 720 * 3600 * 1000)
return now
