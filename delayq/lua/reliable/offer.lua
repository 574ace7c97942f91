-- offer: store messages, each due after its own delay.
--
-- KEYS[1-16]  messages  see include/queue.lua
-- KEYS[17]  wake  CHANNEL  where a new head is announced: its due time, microseconds
-- KEYS[18]  done  ZSET     ids of messages that were handled lately, scored by how long they are remembered, microseconds
-- KEYS[19]  call  STRING   what this client's last call to this queue was, and its reply
-- ARGV[1]  number    int  of this call: the same as the last one's when its answer was lost
-- ARGV[2]  max_size  int  refuse messages beyond this many live ones; 0: no limit
-- ARGV[...]  id, priority, delay_us, ttl_us, on_duplicate, content  for each message; ttl_us 0: no end
--
-- Returns for each message: 1 stored, 2 put in the place of an earlier one, 0 ignored, -1 there is one already, -2 full. And
-- behind these -3, if the user may not announce a new head.
-- include: clock
-- include: queue

local last = redis.call('GET', KEYS[19])
if last then
  local known, reply = string.match(last, '^(%d+) (.*)$')
  local readable, outcomes = pcall(cjson.decode, reply or '')
  if readable and known == ARGV[1] then
    -- A write, so that a caller that waits for its writes to be safe waits for those of the first try, too.
    redis.call('SET', KEYS[19], last, 'PX', 120000)
    return outcomes
  end
  -- This first try was overtaken by its repetition: its answer is no longer awaited.
  if finite(known, 0) > tonumber(ARGV[1]) then return redis.error_reply('DELAYQ_LATE the call was repeated, and answered') end
end

-- Return which of these ids are in use, by id.
local function in_use(ids)
  local taken = {}
  if #ids == 1 then
    if redis.call('HEXISTS', KEYS[11], ids[1]) == 1 then taken[ids[1]] = true end
    return taken
  end
  for _, at in ipairs(live_sets()) do
    for i, score in ipairs(redis.call('ZMSCORE', KEYS[at], unpack(ids))) do
      if score then taken[ids[i]] = true end
    end
  end
  return taken
end

-- The writes, collected: one command for all costs a third of one for each. By priority: places, and the first due time.
local bodies, places, earliest, priorities, expiries = {}, {}, {}, {}, {}
local function write()
  for priority, due in pairs(earliest) do
    -- Tell the others only if they would wake too late otherwise.
    local _, first = head_of(KEYS[priority + 1])
    if not first or due < first then announce(due, KEYS[17]) end
  end
  -- Next the keys that may be of a foreign type: the type of the bodies is known.
  for priority, set in pairs(places) do redis.call('ZADD', KEYS[priority + 1], unpack(set)) end
  if #bodies > 0 then redis.call('HSET', KEYS[11], unpack(bodies)) end
  if #priorities > 0 then redis.call('HSET', KEYS[16], unpack(priorities)) end
  if #expiries > 0 then redis.call('HSET', KEYS[14], unpack(expiries)) end
  bodies, places, earliest, priorities, expiries = {}, {}, {}, {}, {}
end

local now = now_us()
local max_size = tonumber(ARGV[2])
local count = (#ARGV - 2) / 6
local ids = {}
for i = 3, #ARGV, 6 do
  local delay = tonumber(ARGV[i + 2])
  if not delay or delay < 0 or delay > 9007199254740992000 then
    return redis.error_reply('DELAYQ_DELAY delay out of range')
  end
  ids[#ids + 1] = ARGV[i]
end
local remembers = redis.call('EXISTS', KEYS[18]) == 1
local live = max_size > 0 and redis.call('HLEN', KEYS[11]) or 0
if max_size > 0 and live + count > max_size then
  local due, waiting = expired_of_all(now)
  live = live - due - waiting
end
local taken = in_use(ids)
for id in pairs(taken) do
  local found = find(id, now)
  -- An expired message counts as absent, although no claim has dropped it yet, and so does one of which a part is missing.
  if found and found.expired then set_aside(id, found, now) end
  if not found or found.expired then taken[id] = nil end
end
local enqueued = string.format('%.0f ', now)
local reply = {}
for i = 3, #ARGV, 6 do
  local id, priority, ttl, on_duplicate = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 3], ARGV[i + 4]
  local place_in_call = (i - 3) / 6
  local status = 1
  if taken[id] then
    status = on_duplicate == 'ignore' and 0 or -1
    if on_duplicate == 'replace' then
      write()
      local found = find(id, now)
      if not found.leased then
        remove(id, found.priority)
        live = live - 1
        status = 2
      end
    end
  elseif remembers and on_duplicate ~= 'replace' and finite(redis.call('ZSCORE', KEYS[18], id), 0) > now then
    status = on_duplicate == 'ignore' and 0 or -1
  end
  if status == 1 and max_size > 0 and live >= max_size then status = -2 end
  if status > 0 then
    -- A quarter of a microsecond apart, so that they keep their order. Those without a delay are put back in time for it.
    local delay = tonumber(ARGV[i + 2])
    local due = delay > 0 and now + delay + place_in_call / 4 or now - (count - place_in_call) / 4
    live = live + 1
    taken[id] = true
    local place = #bodies
    bodies[place + 1], bodies[place + 2] = id, enqueued .. ARGV[i + 5]
    local set = places[priority]
    if not set then
      set = {}
      places[priority] = set
    end
    place = #set
    set[place + 1], set[place + 2] = due, id
    if priority > 0 then
      place = #priorities
      priorities[place + 1], priorities[place + 2] = id, priority
    end
    if ttl ~= '0' then
      place = #expiries
      expiries[place + 1], expiries[place + 2] = id, number(now + tonumber(ttl))
    end
    if not earliest[priority] or due < earliest[priority] then earliest[priority] = due end
  end
  reply[#reply + 1] = status
end
write()
-- Last, because a full server refuses a script only before its first write.
if remembers then trim(KEYS[18], now) end
if not may_announce then reply[#reply + 1] = -3 end
redis.call('SET', KEYS[19], ARGV[1] .. ' ' .. cjson.encode(reply), 'PX', 120000)
return reply
