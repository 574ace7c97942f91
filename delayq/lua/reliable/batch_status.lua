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
-- Returns {created, total, ended, open, handled, dead, cancelled, running, expired}, or nothing if there is
-- no such batch. total: "?" if it was not offered whole. running: how many of those that are
-- open have a worker. expired: how many messages of the batch, or that follow from it, have expired, which
-- no claim has seen yet.
-- include: clock
-- include: leases
-- include: batches
-- include: at_rest

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
-- messages, whichever are fewer.
local function count_in(set, from, to, state, is_in_range)
  local base, names = batch .. '\0' .. state .. '\0', {}
  local size, most = redis.call('ZCOUNT', set, from, to), count_members(batch, state)
  if size == 0 or most == 0 then return 0 end
  if size <= most then
    for i, id in ipairs(redis.call('ZRANGEBYSCORE', set, from, to)) do names[i] = base .. id end
    return count_scores(batch_members, names, function() return true end)
  end
  for i, member in ipairs(redis.call('ZRANGEBYLEX', batch_members, range_of(batch, state))) do names[i] = string.sub(member, #base + 1) end
  return count_scores(set, names, is_in_range)
end

local function count_expired_in(state)
  return count_in(expiry_index, '-inf', string.format('(%.0f', now), state, function(score) return score < now end)
end

return {
  created, total, ended, open, count_members(batch, 'h'), count_members(batch, 'd'), count_members(batch, 'c'),
  count_in(leased, string.format('(%.0f', now), '+inf', 'o', function(score) return score > now end),
  count_expired_in('o') + count_expired_in('f'),
}
