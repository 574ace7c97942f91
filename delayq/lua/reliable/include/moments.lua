-- moments: messages that are offered for one moment, which keep the order of their offers. Needs
-- clock.
--
-- Keys:
--   shared_moments  ZSET  moments for which several messages were offered, scored by the due time of
--                         the last one, microseconds

-- The due time of the last message for each moment that this call has seen.
local last_due = {}
-- The due times and moments to write: of moments that have several messages.
local new_moments = {}
-- Whether any moment has several messages on the server; nil before the first look.
local has_shared
-- The last due time in each set: nothing later than that can be taken.
local last_scores = {}

-- Return whether a message in this set is due exactly at a moment.
local function is_taken(moment, name, set)
  if not last_scores[set] then
    last_scores[set] = tonumber(redis.call('ZRANGE', set, -1, -1, 'WITHSCORES')[2]) or -math.huge
  end
  return moment <= last_scores[set] and redis.call('ZCOUNT', set, name, name) > 0
end

-- Return the due time of the next message that is offered for a moment, whose text is `name`, and
-- goes into this set; nil if that is not after `earlier`. The first one is due at the moment, and
-- each further one as little later as a score can tell.
local function due_at(moment, name, set, earlier)
  local last = last_due[name]
  if not last then
    if has_shared == nil then has_shared = redis.call('EXISTS', shared_moments) == 1 end
    last = has_shared and tonumber(redis.call('ZSCORE', shared_moments, name) or nil)
  end
  if not last and is_taken(moment, name, set) then last = moment end
  if (last or moment) <= earlier then return nil end
  local due, step = moment, 0.25
  if last then
    repeat due, step = last + step, 2 * step until due > last
    new_moments[#new_moments + 1], new_moments[#new_moments + 2] = format_score(due), name
  end
  last_due[name] = due
  return due
end

-- Return the times at the head of the body of such a message.
local now_text
local function times_at(moment, due, now)
  if due == moment and moment > now then
    -- Most messages, in a third of the time.
    now_text = now_text or string.format('%016.0f0+', now)
    return now_text .. string.format('%.0f', moment - now)
  end
  -- The moment may have passed just now.
  local enqueued = math.min(now, moment)
  return string.format('%016.0f%.0f+%.0f', enqueued, (due - moment) * 4, moment - enqueued)
end

-- Write the moments that have several messages, once these are written.
local function write_moments(now)
  if #new_moments > 0 then
    redis.call('ZADD', shared_moments, unpack(new_moments))
    -- It disappears with the last of them.
    local last = tonumber(redis.pcall('ZRANGE', shared_moments, -1, -1, 'WITHSCORES')[2]) or now
    redis.pcall('PEXPIRE', shared_moments, string.format('%.0f', math.max(0, math.ceil((last - now) / 1000)) + 2000))
  end
  new_moments, last_scores = {}, {}
end

-- Drop moments that passed a second ago.
local function trim_moments(now)
  if has_shared then trim_past(shared_moments, now - 1000000) end
end
