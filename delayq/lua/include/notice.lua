-- notice: tell the other clients that all messages due by `through` are handed out, and when the next one is due; microseconds.
-- Not while more are due, because the others are needed then. Returns how many have heard it, or -1 if the user may not publish
-- it: a notice only spares others a look, and nothing depends on it.
local function give_notice(channel, now, wait, through, signature)
  if signature == '' or wait == 0 then return 0 end
  local heard = redis.pcall('PUBLISH', channel, string.format('%.0f %.0f %s', wait < 0 and -1 or now + wait, through, signature))
  return type(heard) == 'number' and heard or -1
end
