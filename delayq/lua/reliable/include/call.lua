-- call: tell the repetition of a call from a new call. See docs/redis-data-model.md.
--
-- The key `call` is a STRING: the number of the last call of one of a client's slots, and the reply
-- to it. A client repeats a call whose reply was lost, under the same number.
--
-- A call with the number 0 stores rows of an outbox. It has a key of its own, and may be repeated by
-- another process, which must not store what has been handled meanwhile. So its reply is kept until
-- the rows are deleted: if nobody ever repeats the call, for a year.

-- Return for how long a reply is kept, milliseconds.
local function kept_ms() return number == '0' and 31536000000 or 120000 end

-- Return the reply of the first try if this is a repetition, an error if the repetition of this
-- call came first, and nil for a new call.
local function earlier_reply()
  local last_call = redis.call('GET', call)
  if not last_call then return nil end
  local last_number = string.match(last_call, '^%d+')
  if last_number == number then
    local readable, reply = pcall(cjson.decode, string.sub(last_call, #number + 2))
    if not readable then return nil end
    -- A write, so that a caller that waits for its writes to be safe waits for those of the first
    -- try, too.
    redis.call('SET', call, last_call, 'PX', kept_ms())
    return reply
  end
  -- This first try was overtaken by its repetition: its reply is no longer awaited.
  if (tonumber(last_number) or 0) > tonumber(number) then
    return redis.error_reply('DELAYQ_LATE the call was repeated, and answered')
  end
  return nil
end

-- If this is refused, a repetition of the call is a new one; but the call has done its work.
local function keep_reply(reply)
  redis.pcall('SET', call, number .. ' ' .. cjson.encode(reply), 'PX', kept_ms())
end
