-- receive: store what was set aside in another partition, in one of the keys of this one.
--
-- Keys:
--   settings  HASH          see include/settings.lua
--   target    ZSET or HASH  the key
-- Arguments:
--   epoch      text  of the settings since the caller began, or continued, the move
--   lives_ms   int   for how long the key lives at least; 0: for good
--   kind       text  "scores" of the members of a sorted set, unless theirs are higher; "fields" of a
--                    hash; "new fields": unless they have other values
--   member...  text  each member or field
--   value...   text  its score or value
-- Roles: admin
-- Repeatable: yes
--
-- Returns the fields that have other values, and were not stored. An error, DELAYQ_SETTINGS, if
-- another process has taken the move over, or it has ended; then nothing was changed.
-- include: settings

if not is_moved_by(epoch) then return settings_changed() end
local pairs_of, taken = {}, {}
for at = FIRST, #ARGV, STRIDE do
  local member, value = ARGV[at + MEMBER], ARGV[at + VALUE]
  if kind == 'scores' then member, value = value, member end
  local old = kind == 'new fields' and redis.call('HGET', target, member)
  if old and old ~= value then
    taken[#taken + 1] = member
  else
    pairs_of[#pairs_of + 1], pairs_of[#pairs_of + 2] = member, value
  end
end
if kind == 'scores' then redis.call('ZADD', target, 'GT', unpack(pairs_of)) end
if kind ~= 'scores' and #pairs_of > 0 then redis.call('HSET', target, unpack(pairs_of)) end
if tonumber(lives_ms) > 0 and redis.call('PTTL', target) < tonumber(lives_ms) then redis.call('PEXPIRE', target, lives_ms) end
return taken
