-- notice: tell the other clients that what was due by `through` is handed out, and when the next one is due; microseconds. Not
-- while more is due, for then they are needed. Returns how many have heard it; -1 when the user may not publish it: a notice
-- spares others a look, and nothing depends on it.
local function give_notice(channel, now, wait, through, signature)
  if signature == '' or wait == 0 then return 0 end
  local heard = redis.pcall('PUBLISH', channel, string.format('%.0f %.0f %s', wait < 0 and -1 or now + wait, through, signature))
  return type(heard) == 'number' and heard or -1
end
