-- history: where the counts of a minute or an hour lie.
--
-- The HASH is a ring: a minute takes the field that the same minute of the day before had, and an
-- hour that of 30 days before. So nothing needs to be dropped.

-- Return the field of the minute ('m') or hour ('h') that is `ago` such units back, and its number.
local function field_of(unit, now, ago)
  local seconds, kept = 60, 1440
  if unit == 'h' then seconds, kept = 3600, 720 end
  local number = math.floor(now / (seconds * 1000000)) - ago
  return unit .. number % kept, string.format('%d', number)
end
