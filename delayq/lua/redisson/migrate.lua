-- migrate: bring records into the form that this server's Redisson writes today, one step at a
-- time. Id, payload, due time and place in the ordered list stay as they are.
--
-- Keys:
--   timeout  ZSET  records, scored by due time, ms
--   ordered  LIST  the same records in offer order
-- Arguments:
--   rewrite    0 or 1  0: only look
--   before     int     look at entries of the ordered list before this index; an index past its end
--                      is its end
--   limit      int     look at this many of them at most: a script blocks the whole server while it
--                      runs
--   record...  bytes   outdated, and known to be only in the sorted set: each is brought up to date
--                      there
-- Roles: admin
-- Repeatable: yes
--
-- Returns {length_bytes, length, first, merged, counts...}. first: the index of the first entry
-- looked at, for the next step. merged: the number of records whose current form was in the sorted
-- set beside the outdated one. Then three counts for each form, in the order of FORMS: entries of
-- the ordered list, those among them that are in the sorted set, and given records.
-- include: record

-- By the number of bytes before the payload. The fifth form is any other.
local FORMS = {[17] = 1, [13] = 2, [16] = 3, [12] = 4}
local MALFORMED = 5

before, limit = tonumber(before), tonumber(limit)
local may_write = rewrite == '1'
local width = length_bytes()
local current_header = 9 + width

-- Reads come first: a key of a foreign type must fail here, before anything is written.
redis.call('ZCARD', timeout)
local length = redis.call('LLEN', ordered)

-- Return the form of a record, and its replacement; nil if it stays.
local function renewed(record)
  local payload = payload_of(record)
  if not payload then return MALFORMED, nil end
  local header = #record - #payload
  if header == current_header then return FORMS[header], nil end
  local id_at = header % 4 == 1 and 2 or 1
  -- No payload needs over four bytes of length. They are copied, not packed.
  local id_and_length = string.sub(record, id_at, id_at + 11)
  return FORMS[header], '\8' .. id_and_length .. (width == 8 and '\0\0\0\0' or '') .. payload
end

local merged = 0
-- Replace a record in the sorted set. Returns whether it was there.
local function replace_in_set(record, by)
  local score = redis.call('ZSCORE', timeout, record)
  if not score then return false end
  if by and redis.call('ZSCORE', timeout, by) then merged = merged + 1 end
  if by and may_write then
    -- A full server accepts all writes after one that takes no memory.
    redis.call('ZREM', timeout, '\255')
    -- Same id and payload: one message. Only the current form can be rescheduled: its time counts.
    redis.call('ZADD', timeout, 'NX', score, by)
    redis.call('ZREM', timeout, record)
  end
  return true
end

local LISTED, LISTED_AND_IN_SET, GIVEN, COUNTS_PER_FORM = 1, 2, 3, 3
local counts = {}
for i = 1, MALFORMED * COUNTS_PER_FORM do counts[i] = 0 end
local function count(form, what)
  local index = COUNTS_PER_FORM * (form - 1) + what
  counts[index] = counts[index] + 1
end

before = math.min(before, length)
local first = math.max(before - limit, 0)
-- From the nearer end: Redis 6.2 walks to a positive index from the head, however far that is.
local origin = 2 * first > length and length or 0
local entries = first < before and redis.call('LRANGE', ordered, first - origin, before - 1 - origin) or {}
for i, record in ipairs(entries) do
  local form, by = renewed(record)
  count(form, LISTED)
  if replace_in_set(record, by) then count(form, LISTED_AND_IN_SET) end
  if by and may_write then redis.call('LSET', ordered, first + i - 1 - origin, by) end
end
for _, record in ipairs(records) do
  local form, by = renewed(record)
  if by and replace_in_set(record, by) then count(form, GIVEN) end
end

return {width, length, first, merged, unpack(counts)}
