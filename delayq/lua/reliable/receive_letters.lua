-- receive_letters: store dead letters that were set aside in another partition.
--
-- Keys:
--   settings       HASH  see include/settings.lua
--   dead           ZSET  names of dead letters, scored by their time of death, microseconds
--   dead_messages  HASH  name to the reason, as JSON, newline, body: see include/letters.lua
-- Arguments:
--   epoch      text   of the settings since the caller began, or continued, the move
--   name...    text   each letter's name; if another letter has it, it gets another stamp
--   died...    float  its time of death, microseconds
--   letter...  text   the letter
-- Roles: admin
-- Repeatable: yes
--
-- Returns 1. An error, DELAYQ_SETTINGS, if another process has taken the move over, or it has ended;
-- then nothing was changed.
-- include: settings
-- include: letters

if not is_moved_by(epoch) then return settings_changed() end
check_letters()
local function body_in(text) return string.match(text, '\n(.*)$') or text end
for at = FIRST, #ARGV, STRIDE do
  local name, died, letter = ARGV[at + NAME], ARGV[at + DIED], ARGV[at + LETTER]
  local id, stamp = string.match(name, ID_AND_STAMP)
  -- The same names are tried again if a letter is stored twice, and then it may tell less.
  local moment = tonumber(stamp or string.match(body_in(letter), '^' .. string.rep('%d', 16)) or math.floor(tonumber(died)))
  id = id or name
  local old = redis.call('HGET', dead_messages, name)
  while old and body_in(old) ~= body_in(letter) do
    stamp, moment = string.format('%016.0f', moment), moment + 1
    name = id .. '\0' .. stamp
    old = redis.call('HGET', dead_messages, name)
  end
  redis.call('ZADD', dead, died, name)
  if not old then redis.call('HSET', dead_messages, name, letter) end
  local stamps = redis.call('HGET', dead_messages, id .. '\0') or ''
  if stamp and not string.find(stamps, ' ' .. stamp, 1, true) then
    redis.call('HSET', dead_messages, id .. '\0', stamps .. ' ' .. stamp)
  end
end
return 1
