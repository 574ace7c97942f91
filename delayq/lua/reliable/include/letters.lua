-- letters: dead letters. See docs/redis-data-model.md.
--
-- A letter is stored under its message's id. If that id has a letter already, the next one is
-- stored under the id, a NUL and sixteen digits; those digits are listed, each behind a space,
-- under the id and a NUL. So no letter takes the place of another.
local ID_AND_STAMP = '^(.*)%z(%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d)$'

-- Return the id of the message by the name of its letter. A message whose id was freed has such a
-- name, too.
local function id_of(name)
  return string.match(name, ID_AND_STAMP) or name
end

-- A letter is the reason as JSON on one line, a newline, and the body. That of a message with a
-- checkpoint has it between the two, and ends its JSON with the length: ,"checkpoint":120}

-- Return the reason, the checkpoint, which is empty if there is none, and the rest of a letter.
local function parse_letter(letter)
  local why, from = string.match(letter, '^([^\n]*)\n()')
  if not why then return letter, '', '' end
  local size = tonumber(string.match(why, ',"checkpoint":(%d+)}$')) or 0
  return why, string.sub(letter, from, from + size - 1), string.sub(letter, from + size)
end

-- One call drops this many letters at most, a few more than it adds.
local MOST_TRIMMED = 600

-- Fail if a key of letters is of a foreign type: call this before anything is written.
local function check_letters()
  redis.call('HGET', dead_messages, '')
  redis.call('ZSCORE', dead, '')
end

-- Add a letter, and return its name. `why` is JSON on one line; `checkpoint` is nil or false if there
-- is none.
local function add_letter(id_or_name, why, body, now, checkpoint)
  local id = id_of(id_or_name)
  local name = id
  if redis.call('HEXISTS', dead_messages, id) == 1 then
    local stamp, moment = nil, now
    repeat
      stamp, moment = string.format('%016.0f', moment), moment + 1
      name = id .. '\0' .. stamp
    until redis.call('HEXISTS', dead_messages, name) == 0
    redis.call('HSET', dead_messages, id .. '\0', (redis.call('HGET', dead_messages, id .. '\0') or '') .. ' ' .. stamp)
  end
  -- In this order, a refusal leaves no text of which nothing tells.
  redis.call('ZADD', dead, string.format('%.2f', now), name)
  if checkpoint then
    why, body = string.sub(why, 1, -2) .. ',"checkpoint":' .. #checkpoint .. '}', checkpoint .. body
  end
  redis.call('HSET', dead_messages, name, why .. '\n' .. body)
  return name
end

local function delete_letters(names)
  redis.call('ZREM', dead, unpack(names))
  redis.call('HDEL', dead_messages, unpack(names))
  for _, name in ipairs(names) do
    local id, stamp = string.match(name, ID_AND_STAMP)
    local stamps = id and redis.call('HGET', dead_messages, id .. '\0')
    if stamps then
      local rest = string.gsub(stamps, ' ' .. stamp, '')
      redis.call('HDEL', dead_messages, id .. '\0')
      if rest ~= '' then redis.call('HSET', dead_messages, id .. '\0', rest) end
    end
  end
end

-- Drop letters that died `keep_us` ago, and the oldest ones beyond `most`; 0 for no limit. Return
-- how many.
local function trim_letters(keep_us, most, now)
  local too_old, too_many = {}, {}
  if keep_us > 0 then
    too_old = redis.call('ZRANGEBYSCORE', dead, '-inf', string.format('%.2f', now - keep_us), 'LIMIT', 0, MOST_TRIMMED)
  end
  local extra = most > 0 and redis.call('ZCOUNT', dead, '-inf', '+inf') - most or 0
  if extra > #too_old then too_many = redis.call('ZRANGE', dead, 0, math.min(extra, MOST_TRIMMED) - 1) end
  -- Both begin with the oldest letter.
  local names = #too_many > #too_old and too_many or too_old
  if #names > 0 then delete_letters(names) end
  return #names
end
