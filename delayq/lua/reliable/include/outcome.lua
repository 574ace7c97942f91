-- outcome: what is known about the end of a message. Needs clock, leases, queue and kept.

-- Return {now, keep, live, record, moment, letter, died}. live: 1 if the message is alive, 0 if not.
-- record and moment: as in include/kept.lua, false if there is none, or it is too old. letter and
-- died: the last dead letter with that id, and its time of death; false if there is none.
local function find_outcome(id, now)
  local keep_us = read_keep()
  local live = find_message(id, now) and 1 or 0
  local moment, record = redis.call('ZSCORE', recorded, id), redis.call('HGET', records, id)
  if keep_us > 0 and number_or(0, moment) <= now - keep_us then moment, record = false, false end
  -- See include/letters.lua. The name without a stamp is that of the oldest letter, or, once that
  -- was redriven, of a later one.
  local stamps = redis.call('HGET', dead_messages, id .. '\0')
  local stamp = stamps and string.match(stamps, '%d+$')
  local name, died = id, redis.call('ZSCORE', dead, id)
  local last = stamp and redis.call('ZSCORE', dead, id .. '\0' .. stamp)
  -- Of several that died in one call, the one without a stamp was the first.
  if last and number_or(0, last) >= number_or(0, died or nil) then name, died = id .. '\0' .. stamp, last end
  return {now, keep_us, live, record, moment, died and redis.call('HGET', dead_messages, name), died}
end
