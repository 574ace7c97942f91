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
-- Returns {created, total, ended, open, handled, dead, cancelled, running}, or nothing if there is no such
-- batch. total: "?" if it was not offered whole. running: how many of those that are open have a worker.
-- include: clock
-- include: leases
-- include: batches
-- include: at_rest

local created, total, ended = read_batch(batch)
if not created then return false end
local open, running, now = count_members(batch, 'o'), 0, now_us()

-- Count members that are leased, from a list of either.
local function count_running(members, prefix, set, first)
  for at = 1, #members, 1000 do
    local names = {}
    for i = at, math.min(at + 999, #members) do names[#names + 1] = prefix .. string.sub(members[i], first) end
    for _, score in ipairs(redis.call('ZMSCORE', set, unpack(names))) do
      if score and (set == batch_members or tonumber(score) > now) then running = running + 1 end
    end
  end
end

local after = string.format('(%.0f', now)
local base = batch .. '\0o\0'
if open == 0 then
  running = 0
elseif redis.call('ZCOUNT', leased, after, '+inf') <= open then
  count_running(redis.call('ZRANGEBYSCORE', leased, after, '+inf'), base, batch_members, 1)
else
  count_running(redis.call('ZRANGEBYLEX', batch_members, range_of(batch, 'o')), '', leased, #base + 1)
end
return {
  created, total, ended, open, count_members(batch, 'h'), count_members(batch, 'd'), count_members(batch, 'c'), running,
}
