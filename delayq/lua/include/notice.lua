-- notice: tell the other clients that all messages due by `through` are handed out, and when the
-- next one is due; microseconds. If more are due, publish nothing, because the others are needed
-- then. Return how many clients got the notice, or -1 if the user may not publish it: a notice only
-- spares others a look, and nothing depends on it.
local function give_notice(channel, now, wait, through, sender)
  if sender == '' or wait == 0 then return 0 end
  local receivers = redis.pcall('PUBLISH', channel, string.format('%.0f %.0f %s', wait < 0 and -1 or now + wait, through, sender))
  return type(receivers) == 'number' and receivers or -1
end
