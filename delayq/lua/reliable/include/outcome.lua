-- outcome: what is known about the end of a message. Needs clock, leases, queue and records.

-- Return {now, keep, live, record, moment, letter, died, ends}, and the message as `find_message`
-- has found it. live: 1 if the message is alive, -1 if it has expired and no claim has dropped it yet,
-- 0 if there is none. record and moment: as in include/records.lua,
-- false if there is none, or it is too old. letter and died: the last dead letter with that id, and
-- its time of death; false if there is none. An expired message that is to be one is, even before a
-- claim has found it. ends: when it expires if no worker takes it, microseconds, or false.
local function find_outcome(id, now)
  local keep_us, message = read_keep(), find_message(id, now)
  local live, ends = message and not message.expired, redis.call('ZSCORE', expiry_index, id)
  local moment, record = redis.call('ZSCORE', record_times, id), redis.call('HGET', records, id)
  if keep_us > 0 and number_or(0, moment) <= now - keep_us then moment, record = false, false end
  -- See include/letters.lua. The name without a stamp is that of the oldest letter, or, once that
  -- was redriven, of a later one.
  local stamps = redis.call('HGET', dead_messages, id .. '\0')
  local stamp = stamps and string.match(stamps, '%d+$')
  local name, died = id, redis.call('ZSCORE', dead, id)
  local last = stamp and redis.call('ZSCORE', dead, id .. '\0' .. stamp)
  -- Of several that died in one call, the one without a stamp was the first.
  if last and number_or(0, last) >= number_or(0, died or nil) then name, died = id .. '\0' .. stamp, last end
  local letter = died and redis.call('HGET', dead_messages, name)
  if message and message.expired and redis.call('HGET', settings, 'expired') == 'dead' then
    local why = {reason = 'expired', attempt = find_attempts(id, message).used, error = redis.call('HGET', errors, id) or nil}
    letter, died = cjson.encode(why) .. '\n' .. redis.call('HGET', bodies, id), ends or moment or format_score(now)
  end
  return {now, keep_us, live and 1 or message and -1 or 0, record, moment, letter, died, live and ends or false}, message
end
