-- letters: dead letters. See docs/redis-data-model.md.
--
-- A letter is stored under its message's id. If that id has a letter already, the next one is stored under the id, a NUL and
-- sixteen digits; those digits are listed, each behind a space, under the id and a NUL. So no letter takes the place of another.
local STAMPED = '^(.*)%z(' .. string.rep('%d', 16) .. ')$'

-- Return the id of the message by the name of its letter. A message that was set aside has such a name, too.
local function id_of(name)
  return string.match(name, STAMPED) or name
end

-- `why` is JSON on one line.
local function post(dead, letters, name, why, body, now)
  local id = id_of(name)
  name = id
  if redis.call('HEXISTS', letters, id) == 1 then
    local stamp, at = nil, now
    repeat
      stamp, at = string.format('%016.0f', at), at + 1
      name = id .. '\0' .. stamp
    until redis.call('HEXISTS', letters, name) == 0
    redis.call('HSET', letters, id .. '\0', (redis.call('HGET', letters, id .. '\0') or '') .. ' ' .. stamp)
  end
  redis.call('HSET', letters, name, why .. '\n' .. body)
  redis.call('ZADD', dead, string.format('%.2f', now), name)
end

-- Delete letters.
local function discard(dead, letters, names)
  redis.call('ZREM', dead, unpack(names))
  redis.call('HDEL', letters, unpack(names))
  for _, name in ipairs(names) do
    local id, stamp = string.match(name, STAMPED)
    local stamps = id and redis.call('HGET', letters, id .. '\0')
    if stamps then
      local rest = string.gsub(stamps, ' ' .. stamp, '')
      redis.call('HDEL', letters, id .. '\0')
      if rest ~= '' then redis.call('HSET', letters, id .. '\0', rest) end
    end
  end
end
