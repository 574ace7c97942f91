-- schedule: recurring messages. Needs clock, leases and queue. See docs/redis-data-model.md.
--
-- The hash of schedules holds, by name, facts as JSON, a newline, then headers and payload as in a
-- body. Moments in it are decimal text, because cjson rounds numbers of that size. An occurrence is
-- a message whose id is "name@moment", with the moment at which it is due. `facts.next` is the
-- occurrence that waits, `facts.last` the one that was handed out before it. While `facts.paused` is
-- true, none waits.
--
-- The field with the empty name is how far delayq.testing has moved the queue's time, microseconds:
-- schedules tell the time with it, while everything else was moved back instead.
local function clock_shift() return tonumber(redis.call('HGET', schedules, '') or 0) end

local function format_moment(moment) return string.format('%.0f', moment) end

local function are_facts(facts)
  if type(facts) ~= 'table' or type(facts.upcoming) ~= 'table' then return false end
  for _, name in ipairs({'every', 'first', 'ttl', 'version', 'priority'}) do
    if not tonumber(facts[name]) then return false end
  end
  for _, moment in ipairs({facts.next, facts.last, unpack(facts.upcoming)}) do
    if moment ~= '' and not tonumber(moment) then return false end
  end
  return type(facts.next) == 'string' and type(facts.last) == 'string' and waiting[facts.priority] ~= nil
end

-- An entry that cannot be read counts as absent: other schedules continue, and the next definition
-- of that name replaces it.
local function load_schedule(name)
  local stored = redis.call('HGET', schedules, name)
  local facts_text, content = string.match(stored or '', '^([^\n]*)\n(.*)$')
  if not facts_text then return nil end
  local readable, facts = pcall(cjson.decode, facts_text)
  if readable and are_facts(facts) then return facts, content end
  return nil
end

local function save_schedule(name, facts, content)
  redis.call('HSET', schedules, name, cjson.encode(facts) .. '\n' .. content)
end

-- Return the occurrence of that moment, as `find_message` describes it; nil if it is not alive.
local function find_occurrence(name, moment, now)
  if not moment or moment == '' then return nil end
  local message = find_message(name .. '@' .. moment, now)
  return message and not message.expired and message or nil
end

-- If a schedule has ended while its last occurrence is still alive, the moment of that occurrence
-- stays: a schedule of that name that begins meanwhile waits for it. Returns nil if there is none.
local function last_of_ended(name, now)
  local moment = string.match(redis.call('HGET', schedules, name) or '', '^{"ended":"(%d+)"}\n$')
  return moment and find_occurrence(name, moment, now) and moment or nil
end

-- Change nothing, but demand the rights to store a schedule and its next occurrence, before the one
-- that waits is deleted.
local function demand_storing(name)
  demand_removal()
  redis.call('ZRANGE', leased, 1, 0)
  redis.call('ZADD', leased, 'XX', 0, '\255')
  redis.call('HSET', schedules, name, redis.call('HGET', schedules, name))
end

local function save_end(name, moment)
  redis.call('HSET', schedules, name, '{"ended":"' .. moment .. '"}\n')
end

-- Make the first occurrence after `moment` the schedule's next one; none if no such moment is
-- known.
local function skip_to_after(facts, moment)
  local every = tonumber(facts.every)
  if every > 0 then
    local first = tonumber(facts.first)
    facts.next = format_moment(first + math.max(0, math.floor((moment - first) / every) + 1) * every)
    return
  end
  while facts.upcoming[1] and tonumber(facts.upcoming[1]) <= moment do table.remove(facts.upcoming, 1) end
  facts.next = table.remove(facts.upcoming, 1) or ''
end

-- Enqueue the next occurrence, unless it waits already or the schedule is paused.
local function enqueue_next(name, facts, content, now, shift)
  if facts.paused or facts.next == '' or find_occurrence(name, facts.next, now) then return end
  local id, due = name .. '@' .. facts.next, tonumber(facts.next) - shift
  -- It may have been due for a while.
  local enqueued = math.min(now, due)
  redis.call('HSET', bodies, id, format_moment(enqueued) .. '+' .. format_moment(due - enqueued) .. content)
  if facts.priority > 0 then redis.call('HSET', priorities, id, facts.priority) end
  if tonumber(facts.ttl) > 0 then
    local expiry = format_score(due + tonumber(facts.ttl))
    redis.call('HSET', expiries, id, expiry)
    redis.call('ZADD', expiry_index, expiry, id)
  end
  enqueue(id, facts.priority, due, now)
end
