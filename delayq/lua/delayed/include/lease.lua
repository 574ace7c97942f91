-- lease: payloads that are out with somebody, and come back to the head of the ready list. See docs/redis-data-model.md.
local function take_back(ready, leases, leased, tokens)
  if #tokens == 0 then return 0 end
  redis.call('ZREM', leases, unpack(tokens))
  local payloads = redis.call('HMGET', leased, unpack(tokens))
  redis.call('HDEL', leased, unpack(tokens))
  local count = 0
  -- The first of them becomes the head.
  for i = #tokens, 1, -1 do
    if payloads[i] then
      redis.call('LPUSH', ready, payloads[i])
      count = count + 1
    end
  end
  return count
end
