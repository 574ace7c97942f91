-- notice: tell the other clients that what was due by `through` is handed out, and when the next one is due; microseconds. Not
-- while more is due, for then they are needed. Returns how many have heard it.
local function give_notice(channel, now, wait, through, signature)
  if signature == '' or wait == 0 then return 0 end
  return redis.call('PUBLISH', channel, string.format('%.0f %.0f %s', wait < 0 and -1 or now + wait, through, signature))
end
