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

-- Fail if a key of letters is of a foreign type: call this before anything is written.
local function check_letters()
  redis.call('HGET', dead_messages, '')
  redis.call('ZSCORE', dead, '')
end

-- `why` is JSON on one line.
local function add_letter(id_or_name, why, body, now)
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
  redis.call('HSET', dead_messages, name, why .. '\n' .. body)
  redis.call('ZADD', dead, string.format('%.2f', now), name)
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
