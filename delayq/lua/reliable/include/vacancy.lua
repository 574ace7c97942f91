-- vacancy: whether anything is in a partition. Needs leases.
--
-- Keys:
--   leases        see include/leases.lua
--   dead          ZSET    names of dead letters, scored by their time of death, microseconds
--   schedules     HASH    recurring messages by name: see include/schedule.lua
--   remembered    ZSET    ids that count as taken, scored by the end of that time, microseconds
--   record_times  ZSET    ids of messages of which a record is kept
--   paused        STRING  exists while no client may take anything
--   kept_slots    ZSET    see include/kept_slots.lua
--   batches       HASH    of include/batches.lua

-- Return whether nothing is there that was placed by the number of partitions: no message, slot of a
-- message that was cancelled, batch, dead letter, schedule, remembered id, start that still counts, record or
-- pause, and no group that has settings of its own.
local function is_vacant(now)
  if redis.call('EXISTS', bodies, leased, group_members, dead, record_times, paused, batches) > 0 then return false end
  -- The field with the empty name is none of the schedules.
  if redis.call('HLEN', schedules) > redis.call('HEXISTS', schedules, '') then return false end
  for _, ends in ipairs({remembered, kept_slots}) do
    if redis.call('ZCOUNT', ends, string.format('(%.0f', now), '+inf') > 0 then return false end
  end
  if redis.call('ZCARD', rate_log) > 1000 then return false end
  for _, start in ipairs(redis.call('ZRANGE', rate_log, 0, -1)) do
    local moment, period = string.match(start, '%z([%d.]+) (%S+)')
    if number_or(0, moment) + number_or(0, period) > now then return false end
  end
  return true
end
