-- schedule: recurring messages. Needs clock and queue. See docs/redis-data-model.md.
--
-- The hash of schedules holds, by name, facts as JSON, a newline, then headers and payload as in a body. Moments in it are
-- decimal text, because cjson rounds numbers of that size. An occurrence is a message whose id is "name@moment", with the moment
-- at which it is due. `facts.next` is the occurrence that waits, `facts.last` the one that was handed out before it.
--
-- The field with the empty name is how far delayq.testing has moved the queue's time, microseconds: schedules tell the time
-- with it, while everything else was moved back instead.
local function shift_of(schedules) return tonumber(redis.call('HGET', schedules, '') or 0) end

local function text(moment) return string.format('%.0f', moment) end

local function is_whole(facts)
  if type(facts) ~= 'table' or type(facts.upcoming) ~= 'table' then return false end
  for _, name in ipairs({'every', 'first', 'ttl', 'version', 'priority'}) do
    if not tonumber(facts[name]) then return false end
  end
  for _, moment in ipairs({facts.next, facts.last, unpack(facts.upcoming)}) do
    if moment ~= '' and not tonumber(moment) then return false end
  end
  return type(facts.next) == 'string' and type(facts.last) == 'string' and KEYS[facts.priority + 1] ~= nil
end

-- An entry that cannot be read counts as absent: other schedules continue, and the next definition of that name replaces it.
local function load(schedules, name)
  local stored = redis.call('HGET', schedules, name)
  local text_of_facts, content = string.match(stored or '', '^([^\n]*)\n(.*)$')
  if not text_of_facts then return nil end
  local readable, facts = pcall(cjson.decode, text_of_facts)
  if readable and is_whole(facts) then return facts, content end
  return nil
end

local function save(schedules, name, facts, content)
  redis.call('HSET', schedules, name, cjson.encode(facts) .. '\n' .. content)
end

-- Return the occurrence of that moment, as `find` describes it; nil if it is not alive.
local function occurrence(name, moment, now)
  if not moment or moment == '' then return nil end
  local found = find(name .. '@' .. moment, now)
  return found and not found.expired and found or nil
end

-- If a schedule has ended while its last occurrence is still alive, the moment of that occurrence stays: a schedule of that name
-- that begins meanwhile waits for it. Returns nil if there is none.
local function last_of_ended(schedules, name, now)
  local moment = string.match(redis.call('HGET', schedules, name) or '', '^{"ended":"(%d+)"}\n$')
  return moment and occurrence(name, moment, now) and moment or nil
end

local function save_end(schedules, name, moment)
  redis.call('HSET', schedules, name, '{"ended":"' .. moment .. '"}\n')
end

-- Make the first occurrence after `moment` the schedule's next one; none if no such moment is known.
local function go_on(facts, moment)
  local every = tonumber(facts.every)
  if every > 0 then
    local first = tonumber(facts.first)
    facts.next = text(first + math.max(0, math.floor((moment - first) / every) + 1) * every)
    return
  end
  while facts.upcoming[1] and tonumber(facts.upcoming[1]) <= moment do table.remove(facts.upcoming, 1) end
  facts.next = table.remove(facts.upcoming, 1) or ''
end

-- Put the next occurrence in place, unless it is there already.
local function put(name, facts, content, now, shift, wake)
  if facts.next == '' or occurrence(name, facts.next, now) then return end
  local id, due = name .. '@' .. facts.next, tonumber(facts.next) - shift
  redis.call('HSET', KEYS[11], id, text(now) .. ' ' .. content)
  if facts.priority > 0 then redis.call('HSET', KEYS[16], id, facts.priority) end
  if tonumber(facts.ttl) > 0 then redis.call('HSET', KEYS[14], id, number(due + tonumber(facts.ttl))) end
  place(id, facts.priority, due, wake)
end
