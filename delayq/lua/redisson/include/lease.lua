-- lease: messages that a client holds under a token, until it is done or its lease ends. See
-- docs/redis-data-model.md.
--
-- A token with a number stands for one payload. The bare name of a call stands for all payloads
-- that the call handed out. One that ends in ":pending" stands for the records that a call took out
-- while they were pending: whether the ordered list had them, then each behind its due time in ms.
local PENDING = ':pending'

local function numbered_token(call_name, number) return string.format('%s:%03d', call_name, number) end

-- Join strings, each behind its length. Plain functions only: the text runs on every server.
local function pack_parts(parts)
  local packed = {}
  for i, part in ipairs(parts) do packed[i] = #part .. ':' .. part end
  return table.concat(packed)
end

local function unpack_parts(content)
  local parts, at = {}, 1
  while at <= #content do
    local _, colon, length = string.find(content, '^(%d+):', at)
    if not colon then break end
    at = colon + length + 1
    parts[#parts + 1] = string.sub(content, colon + 1, at - 1)
  end
  return parts
end

-- Add leases that end at the same time, in one write to each key. One without its messages, if the
-- second write is refused, ends by itself.
local function add_leases(tokens, ends_ms, contents)
  local score, fields, scores = string.format('%.0f', ends_ms), {}, {}
  for i, token in ipairs(tokens) do
    fields[i * 2 - 1], fields[i * 2] = token, contents[i]
    scores[i * 2 - 1], scores[i * 2] = score, token
  end
  redis.call('ZADD', leases, unpack(scores))
  redis.call('HSET', leased, unpack(fields))
end

-- Tell before anything is written whether leases may end, and let a full server accept the rest.
local function demand_ends()
  redis.call('ZREM', leases, '\255')
  redis.call('HDEL', leased, '\255')
end

-- End these leases, and put their messages back where they were: the first one becomes the head.
-- Return the number of messages.
local function end_leases(tokens)
  local count = 0
  if #tokens > 0 then demand_ends() end
  for i = #tokens, 1, -1 do
    local token = tokens[i]
    local content = redis.call('HGET', leased, token)
    if content and string.sub(token, -#PENDING) == PENDING then
      local parts = unpack_parts(content)
      for at = #parts, 3, -2 do
        local due, record = parts[at - 1], parts[at]
        if due ~= '' then redis.call('ZADD', timeout, due, record) end
        if parts[1] == '1' and type(redis.pcall('LPUSH', ordered, record)) == 'table' then
          -- It is still leased.
          redis.call('ZREM', timeout, record)
          redis.call('LPUSH', ordered, record)
        end
        count = count + 1
      end
    elseif content then
      local payloads = string.find(token, ':', 1, true) and {content} or unpack_parts(content)
      for at = #payloads, 1, -1 do redis.call('LPUSH', ready, payloads[at]) end
      count = count + #payloads
    end
    -- Last, so that nothing is lost if a write before is refused.
    redis.call('ZREM', leases, token)
    redis.call('HDEL', leased, token)
  end
  return count
end
