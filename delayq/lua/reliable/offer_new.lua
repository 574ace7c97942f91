-- offer_new: store messages under ids that the client has generated, all with the default options:
-- priority 0, and no time to live. The queue has no size limit.
--
-- Keys:
--   waiting_0  ZSET     of include/queue.lua
--   bodies     HASH     see include/leases.lua
--   moments    see include/moments.lua
--   wake       CHANNEL  where a new head is announced: its due time, microseconds
--   settings   HASH     see include/settings.lua
--   call       STRING   see include/call.lua
-- Arguments:
--   number       int   of this call: the same as that of the last one if its reply was lost
--   partitions   int   the number of partitions by which the caller has placed the messages
--   id...        text  of each message
--   when...      text  microseconds from now, as a body has them: 30000001 or 3e7; or "@" and the
--                      moment, microseconds
--   content...   text  limits, or nothing; a space and headers, or nothing; newline,
--                      payload
-- Roles: producer
-- Repeatable: yes
-- Stores: yes
--
-- Returns 1 if they are stored; -3 if they are, and the user may not announce a new head; -1 if one
-- of the ids is in use, and none is stored. An error, DELAYQ_SETTINGS, if the queue has another
-- number of partitions, or a size limit.
-- include: clock
-- include: moments
-- include: settings
-- include: call

local reply = earlier_reply()
if reply then return reply end
local layout, stored_number, max_size = unpack(redis.call('HMGET', settings, 'layout', 'partitions', 'max_size'))
if not agrees_on(partitions, layout, stored_number) then return settings_changed() end
if max_size and string.find(max_size, '^%d*[1-9]%d*$') then return settings_changed() end

-- The messages of a call are a quarter of a microsecond apart, so that they keep their order. Those
-- without a delay begin so long before now that the last of them is not due later than now.
local now = now_us()
local earlier, quarters, whole, whole_of = now - math.ceil(COUNT / 4), {[0] = '0', '1', '2', '3'}, nil, nil
local names, new_bodies, scores, count, earliest = {}, {}, {}, 0, math.huge
for at = FIRST, #ARGV, STRIDE do
  local id, when = ARGV[at + ID], ARGV[at + WHEN]
  local delay, moment, moment_text = tonumber(when), nil, nil
  if not delay then moment, moment_text = moment_in(when) end
  local wait_or_moment = delay or moment
  if not wait_or_moment or wait_or_moment < 0 or wait_or_moment > 9007199254740992000 then
    return redis.error_reply('DELAYQ_DELAY delay out of range')
  end
  local due, times = moment and due_at(moment, moment_text, waiting[0], earlier), nil
  if due then
    times = times_at(moment, due, now)
  else
    -- A moment that has passed counts as a delay of 0.
    local waits = delay and delay > 0
    local since, quarter = waits and now or earlier, count % 4
    local base = since + (count - quarter) / 4
    if base ~= whole_of then whole, whole_of = string.format('%.0f', base), base end
    due, times = since + count / 4 + (waits and delay or 0), whole .. quarters[quarter] .. (waits and '+' .. when or '')
  end
  if due < earliest then earliest = due end
  local even = 2 * count + 2
  count = count + 1
  names[count] = id
  -- A number would be turned into text, which costs more.
  scores[even - 1], scores[even] = due == moment and moment_text or due, id
  new_bodies[even - 1], new_bodies[even] = id, times .. ARGV[at + CONTENT]
end
reply = 1
for _, body in ipairs(redis.call('HMGET', bodies, unpack(names))) do
  if body then reply = -1 end
end
if reply == -1 then
  keep_reply(reply)
  return reply
end

local head = redis.call('ZRANGE', waiting[0], 0, 0, 'WITHSCORES')[2]
-- Tell the others only if they would wake too late otherwise.
if not head or earliest < tonumber(head) then
  local receivers = redis.pcall('PUBLISH', wake, string.format('%.0f', math.max(math.ceil(earliest), now)))
  -- A hint, which changes nothing if it is refused.
  if type(receivers) ~= 'number' then reply = -3 end
end
-- First the key that may be of a foreign type: the type of the bodies is known.
redis.call('ZADD', waiting[0], unpack(scores))
redis.call('HSET', bodies, unpack(new_bodies))
write_moments(now)
trim_moments(now)
-- Last, so that a full server does not refuse it: that refuses only the first write of a script.
keep_reply(reply)
return reply
