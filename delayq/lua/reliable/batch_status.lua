-- batch_status: count the messages of a batch by their states.
--
-- Keys:
--   leases    see include/leases.lua
--   settings  HASH  see include/settings.lua
--   batches   see include/batches.lua
-- Arguments:
--   batch  text  its id
-- Roles: producer, consumer, admin, dashboard
-- Repeatable: yes
--
-- Returns {created, total, ended, open, handled, dead, cancelled, running, some_expired}, or nothing if
-- there is no such batch. total: "?" if it was not offered whole. running: how many of those that are
-- open have a worker. some_expired: whether a message of the batch, or one that follows from it, has
-- expired, which no claim has seen yet; a hint: where there are many, each call looks at others.
-- include: clock
-- include: leases
-- include: batches
-- include: at_rest

-- How many messages a call looks at to find one that has expired.
local MOST_EXPIRED = 1000

local created, total, ended = read_batch(batch)
if not created then return false end
local open, now = count_members(batch, 'o'), now_us()

-- Count those of these members of a set whose scores count.
local function count_scores(set, members, counts)
  local count = 0
  for at = 1, #members, 1000 do
    for _, score in ipairs(redis.call('ZMSCORE', set, unpack(members, at, math.min(at + 999, #members)))) do
      if score and counts(tonumber(score)) then count = count + 1 end
    end
  end
  return count
end

-- Count the messages in a state whose scores in a set are in a range: from the set, or from the
-- messages, by the smaller number. If even that is over `most`, look at so many of them, from a place
-- that changes.
local function count_in(set, from, to, state, is_in_range, most)
  local base, names = batch .. '\0' .. state .. '\0', {}
  local size, member_count = redis.call('ZCOUNT', set, from, to), count_members(batch, state)
  local count = math.min(size, member_count)
  if count == 0 then return 0 end
  local skipped = count > most and now % (count - most + 1) or 0
  if size <= member_count then
    for i, id in ipairs(redis.call('ZRANGEBYSCORE', set, from, to, 'LIMIT', skipped, most)) do names[i] = base .. id end
    return count_scores(batch_members, names, function() return true end)
  end
  local first, last = range_of(batch, state)
  for i, member in ipairs(redis.call('ZRANGEBYLEX', batch_members, first, last, 'LIMIT', skipped, most)) do names[i] = string.sub(member, #base + 1) end
  return count_scores(set, names, is_in_range)
end

local function has_expired_in(state)
  return count_in(expiry_index, '-inf', string.format('(%.0f', now), state, function(score) return score < now end, MOST_EXPIRED) > 0
end

return {
  created, total, ended, open, count_members(batch, 'h'), count_members(batch, 'd'), count_members(batch, 'c'),
  count_in(leased, string.format('(%.0f', now), '+inf', 'o', function(score) return score > now end, open),
  (has_expired_in('o') or has_expired_in('f')) and 1 or 0,
}
