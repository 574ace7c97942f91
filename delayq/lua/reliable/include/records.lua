-- records: the records and results that outlive messages. See docs/redis-data-model.md.
--
-- Keys:
--   record_times  ZSET  ids with a record, scored by the time of its last change, microseconds
--   records       HASH  id to "state offered count", newline, as many lines, one for each attempt,
--                       then the result. state: "live" if the message was not finished, "done", or
--                       "result" if it was and has one. offered: the time of the offer, from the
--                       body. An attempt is "finished", a space, and JSON; finished: microseconds
--   settings      HASH  see include/settings.lua; CHANNEL  where finished messages are announced:
--                       "finished", and the id

-- A record has the last attempts only, this many.
local MOST_ATTEMPTS = 10
-- One call drops this many records at most, a few more than it adds.
local MOST_DROPPED = 600

-- Fail if a key of records is of a foreign type: call this before the first write.
local function check_records()
  redis.call('ZSCORE', record_times, '')
  redis.call('HGET', records, '')
  redis.call('HGET', settings, '')
end

-- Return the attempts that are recorded of a message which was offered then and has not finished, as
-- lines, and how many these are.
local function recorded_attempts(id, offered)
  local same, count, at = string.match(redis.call('HGET', records, id) or '', '^live (%d+) (%d+)\n()')
  if same ~= offered then return '', 0 end
  return string.sub(redis.call('HGET', records, id), at), tonumber(count)
end

-- Return the record of a message after an attempt that has just finished.
local function format_record(state, offered, rows, count, attempt, result, now)
  while count >= MOST_ATTEMPTS do rows, count = string.gsub(rows, '^[^\n]*\n', '', 1), count - 1 end
  -- The format "%s" would cut a short text at its first NUL.
  local row = string.format('%.0f ', now) .. attempt .. '\n'
  return state .. ' ' .. offered .. string.format(' %d\n', count + 1) .. rows .. row .. result
end

-- Save records, {id, record, ...}, then drop those that are too old or too many.
local function save_records(new, keep_us, most, now)
  local moment, scores = string.format('%.0f', now), {}
  for i = 1, #new, 2 do scores[i], scores[i + 1] = moment, new[i] end
  redis.call('ZADD', record_times, unpack(scores))
  redis.call('HSET', records, unpack(new))
  local old = redis.call('ZRANGEBYSCORE', record_times, '-inf', string.format('%.0f', now - keep_us), 'LIMIT', 0, MOST_DROPPED)
  local extra = redis.call('ZCOUNT', record_times, '-inf', '+inf') - most
  if extra > #old then old = redis.call('ZRANGE', record_times, 0, math.min(extra, MOST_DROPPED) - 1) end
  if #old > 0 then
    redis.call('ZREM', record_times, unpack(old))
    redis.call('HDEL', records, unpack(old))
  end
  -- All of them disappear with the last one, even if no client comes to drop them.
  for _, key in ipairs({record_times, records}) do redis.call('PEXPIRE', key, string.format('%.0f', math.ceil(keep_us / 1000))) end
end

-- Return for how long records are kept, microseconds, 0 for not at all; and how many.
local function read_keep()
  local keep_us, most = unpack(redis.call('HMGET', settings, 'keep', 'max_kept'))
  return math.min(number_or(0, keep_us), 4503599627370496), math.max(1, number_or(10000, most))
end

-- Record an attempt that has not finished its message. Nothing is recorded if it is empty.
local function record_attempt(id, offered, attempt, now)
  if attempt == '' then return end
  local keep_us, most = read_keep()
  if keep_us <= 0 then return end
  local rows, count = recorded_attempts(id, offered)
  save_records({id, format_record('live', offered, rows, count, attempt, '', now)}, keep_us, most, now)
end

-- Tell clients that wait for it that a message has finished. A hint: they poll as well.
local function announce_finished(id) redis.pcall('PUBLISH', settings, 'finished ' .. id) end
