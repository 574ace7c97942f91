-- await: remember that a client waits for the end of a message. Needs the key awaited.

local function await_end(id, for_us, now)
  local expired = redis.call('ZRANGEBYSCORE', awaited, '-inf', now, 'LIMIT', 0, 100)
  if #expired > 0 then redis.call('ZREM', awaited, unpack(expired)) end
  redis.call('ZADD', awaited, 'GT', string.format('%.0f', now + for_us), id)
  -- The set disappears with the last of them, even if no client comes to trim it.
  local keep_ms = math.ceil(for_us / 1000)
  if redis.call('PTTL', awaited) < keep_ms then redis.call('PEXPIRE', awaited, keep_ms) end
end
