-- summons: call this number of the dormant clients. Needs a channel, summons.

-- All dormant clients hear a summons, so it is given the less often the more they are: a key of the
-- channel's name exists until it may be given again. Only a hint, because they re-check now and then.
-- Return how many heard it.
local function give_summons(number)
  if number <= 0 or redis.call('EXISTS', summons) == 1 then return 0 end
  local receivers = redis.pcall('PUBLISH', summons, string.format('%.0f', number))
  if type(receivers) ~= 'number' then return 0 end
  redis.call('SET', summons, '', 'PX', 20 + math.floor(receivers / 20))
  return receivers
end
