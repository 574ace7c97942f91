-- receive: store what was set aside in another partition, in one of the keys of this one.
--
-- Keys:
--   settings  HASH          see include/settings.lua
--   target    ZSET or HASH  the key
-- Arguments:
--   epoch      text  of the settings since the caller began, or continued, the move
--   lives_ms   int   for how long the key lives at least; 0: for good
--   kind       text  "scores" of the members of a sorted set, unless theirs are higher; "fields" of a
--                    hash; "stamps" to list behind those that such a field has, each behind a space
--   member...  text  each member or field
--   value...   text  its score, value or stamp
-- Roles: admin
-- Repeatable: yes
--
-- Returns 1. An error, DELAYQ_SETTINGS, if another process has taken the move over, or it has ended;
-- then nothing was changed.
-- include: settings

if not is_moved_by(epoch) then return settings_changed() end
local pairs_of = {}
for at = FIRST, #ARGV, STRIDE do
  local member, value = ARGV[at + MEMBER], ARGV[at + VALUE]
  if kind == 'scores' then member, value = value, member end
  if kind == 'stamps' then
    local stamps = redis.call('HGET', target, member) or ''
    if not string.find(stamps, ' ' .. value, 1, true) then redis.call('HSET', target, member, stamps .. ' ' .. value) end
  else
    pairs_of[#pairs_of + 1], pairs_of[#pairs_of + 2] = member, value
  end
end
if kind == 'scores' then redis.call('ZADD', target, 'GT', unpack(pairs_of)) end
if kind == 'fields' then redis.call('HSET', target, unpack(pairs_of)) end
if tonumber(lives_ms) > 0 and redis.call('PTTL', target) < tonumber(lives_ms) then redis.call('PEXPIRE', target, lives_ms) end
return 1
