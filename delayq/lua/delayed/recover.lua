-- recover: what did a transfer hand out whose answer was lost?
--
-- KEYS[1]  taken     LIST  what that call handed out
-- ARGV[1]  fence_ms  int   how long that call, should it still be under way, is kept from handing anything out
--
-- Returns the payloads. They stay, so that this too can be asked again; the caller deletes the key when it has them.

if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('SET', KEYS[1], '', 'PX', ARGV[1])
  return {}
end
local kept = redis.pcall('LRANGE', KEYS[1], 0, -1)
return kept.err and {} or kept -- not a list: the fence of an earlier try
