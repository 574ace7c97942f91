-- migrate: bring records into the form that this server's Redisson writes today, one step at a time. Id, payload, due time and
-- place in the ordered list stay as they are.
--
-- KEYS[1]  timeout  ZSET  records, scored by due time, ms
-- KEYS[2]  ordered  LIST  the same records in offer order
-- ARGV[1]  rewrite  0 or 1  0: only look
-- ARGV[2]  before   int     look at entries of the ordered list before this index; an index past its end is its end
-- ARGV[3]  limit    int     look at this many of them at most: a script blocks the whole server while it runs
-- ARGV[...]  record  outdated, and known to be in the sorted set alone: each is brought up to date there
--
-- Returns {length_bytes, length, first, merged, counts...}. first: the index of the first entry looked at, for the next
-- step. merged: how many had their current form in the sorted set beside the outdated one. Then three counts for each form,
-- in the order of FORMS: entries of the ordered list, how many of these are in the sorted set, and given records.
-- include: record

-- By the number of bytes before the payload. The fifth form is any other.
local FORMS = {[17] = 1, [13] = 2, [16] = 3, [12] = 4}
local MALFORMED = 5

local rewrite, before, limit = ARGV[1] == '1', tonumber(ARGV[2]), tonumber(ARGV[3])
local width = length_bytes()
local current_header = 9 + width

-- Reads come first: a key of a foreign type must fail here, before anything is written.
redis.call('ZCARD', KEYS[1])
local length = redis.call('LLEN', KEYS[2])

-- Return the form of a record, and its replacement; nil if it stays.
local function renewed(record)
  local payload = payload_of(record)
  if not payload then return MALFORMED, nil end
  local header = #record - #payload
  if header == current_header then return FORMS[header], nil end
  local id_at = header % 4 == 1 and 2 or 1
  -- No payload needs more than four bytes of length. They are copied as they are, so they need not be packed.
  local id_and_length = string.sub(record, id_at, id_at + 11)
  return FORMS[header], '\8' .. id_and_length .. (width == 8 and '\0\0\0\0' or '') .. payload
end

local merged = 0
-- Replace a record in the sorted set. Returns whether it was there.
local function replace_in_set(record, by)
  local score = redis.call('ZSCORE', KEYS[1], record)
  if not score then return false end
  if by and redis.call('ZSCORE', KEYS[1], by) then merged = merged + 1 end
  if by and rewrite then
    -- The first write frees memory: then a full server accepts the rest of the script.
    redis.call('ZREM', KEYS[1], record)
    -- Same id and same payload: it is one message. The due time of the current form counts: only that one can be rescheduled.
    redis.call('ZADD', KEYS[1], 'NX', score, by)
  end
  return true
end

local counts = {}
for i = 1, 3 * MALFORMED do counts[i] = 0 end
local function count(form, what)
  local at = 3 * (form - 1) + what
  counts[at] = counts[at] + 1
end

before = math.min(before, length)
local first = math.max(before - limit, 0)
-- From the nearer end: Redis 6.2 walks to a positive index from the head, however far that is.
local origin = 2 * first > length and length or 0
local records = first < before and redis.call('LRANGE', KEYS[2], first - origin, before - 1 - origin) or {}
for place, record in ipairs(records) do
  local form, by = renewed(record)
  count(form, 1)
  if replace_in_set(record, by) then count(form, 2) end
  if by and rewrite then redis.call('LSET', KEYS[2], first + place - 1 - origin, by) end
end
for i = 4, #ARGV do
  local form, by = renewed(ARGV[i])
  if by and replace_in_set(ARGV[i], by) then count(form, 3) end
end

return {width, length, first, merged, unpack(counts)}
