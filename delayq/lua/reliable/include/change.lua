-- change: how settings change. Needs clock and settings, and the key settings.
--
-- Each change gives the settings a higher epoch: so whoever reads them later has those of the higher
-- one, and a copy never gives way to an older one.
--
-- While the number of partitions is about to change, `partitions` ends in a question mark, so that
-- no caller agrees on it, and `renumbering` names the client that changes it, and since when.
--
-- While the queue is moved to another number of partitions, `moving` says how far that has come: see
-- repartition.lua. Then nothing else changes.

-- In the order of HASH_FIELDS in delayq/_reliable/settings.py.
local FIELDS = {
  'layout', 'epoch', 'renumbering', 'moving', 'partitions', 'max_size', 'expired', 'dedup_window', 'keep_dead', 'max_dead',
  'keep', 'max_kept', 'limit', 'group_limit',
}
-- For how long a client may refuse offers while it changes the number of partitions, microseconds.
local CLOSED_FOR = 5000000

-- Return the settings that are stored, by name; nil if they have the layout of another release.
local function read_settings()
  local stored = {}
  for i, value in ipairs(redis.call('HMGET', settings, unpack(FIELDS))) do stored[FIELDS[i]] = value or nil end
  if (stored.layout or LAYOUT) == LAYOUT then return stored end
  return nil
end

-- Return the reply of a script that changes settings: what became of it, and the settings.
local function settings_after(outcome)
  local reply = redis.call('HMGET', settings, unpack(FIELDS))
  table.insert(reply, 1, outcome)
  return reply
end

local function parse_epoch(text)
  local epoch = tonumber(string.match(text or '', '^%d+$'))
  return epoch and epoch < 9007199254740992 and epoch or 0
end

-- Return the number of partitions as text; nil if none was declared.
local function number_in(text)
  local number = string.match(text or '', '^([1-9]%d?%d?%d?)%??$')
  return number and tonumber(number) <= 1024 and number or nil
end

-- Return who changes the number of partitions; nil if nobody does, or not any more.
local function renumbered_by(stored, now)
  local token, since = string.match(stored.renumbering or '', '^(%S+) (%d+)$')
  return token and tonumber(since) + CLOSED_FOR > now and token or nil
end

-- Return whether each partition gets a part of a limit.
local function can_share(limit, partitions)
  for most in string.gmatch(limit or '', '[cr](%d+)') do
    if tonumber(most) < tonumber(partitions) then return false end
  end
  return true
end

-- Add to these names and values what a partition derives from the settings among them.
local function add_share(fields, limit, group_limit, partitions, partition)
  local count, old = tonumber(partitions), redis.call('HMGET', settings, 'share', 'group_limit', 'partitions')
  local share = limit and string.gsub(limit, '([cr])(%d+)', function(kind, most)
    local whole = math.floor(most / count)
    return kind .. string.format('%.0f', partition < most - whole * count and whole + 1 or whole)
  end)
  if share then fields[#fields + 1], fields[#fields + 2] = 'share', share end
  local is_limited = (share or '0') ~= '0' or (group_limit or '0') ~= '0'
  -- After a move, groups are here of which others have not changed the turns yet.
  if (share or '0') ~= (old[1] or '0') or (group_limit or '0') ~= (old[2] or '0')
    or is_limited and number_in(old[3]) ~= partitions then
    fields[#fields + 1], fields[#fields + 2] = 'turns_updated_to', ''
  end
end

-- Store new settings in the first partition, under an epoch above the one given.
local function store_settings(stored, new, epoch, now)
  epoch = string.format('%.0f', math.max(parse_epoch(stored.epoch), epoch, now) + 1)
  local fields, number = {'layout', LAYOUT, 'epoch', epoch}, new.partitions or number_in(stored.partitions) or '1'
  add_share(fields, new.limit or stored.limit, new.group_limit or stored.group_limit, number, 0)
  for field, value in pairs(new) do fields[#fields + 1], fields[#fields + 2] = field, value end
  if new.partitions and stored.renumbering then redis.call('HDEL', settings, 'renumbering') end
  redis.call('HSET', settings, unpack(fields))
  -- A hint: clients read the settings then, and otherwise after their next re-check.
  redis.pcall('PUBLISH', settings, epoch)
end
