-- store: give messages their ids, and store them as pending. Needs record.
--
-- `dues` (ms) and `payloads` are in offer order. Without `is_listed`, the ordered list is left out.
-- Returns the ids.
local MAX_MS = 9007199254740992 -- beyond 2^53 a score is no longer exact
local A_DAY_OF_IDS = 82397      -- in units of an id's upper half (2^20 microseconds)

-- Announce the first of `dues` if it is a new head, because the others would wake too late
-- otherwise. Redisson's clients have no other way to learn of it, so a user who may not publish is
-- refused: call this before anything is written.
local function announce(dues)
  local first = dues[1]
  for _, due in ipairs(dues) do
    if due < first then first = due end
  end
  local head = redis.call('ZRANGE', timeout, 0, 0, 'WITHSCORES')
  if not head[2] or first < tonumber(head[2]) then redis.call('PUBLISH', channel, string.format('%.0f', first)) end
end

local function store(is_listed, now, dues, payloads)
  -- An id is the time in microseconds times 4096, big-endian, so ids sort by offer order, and
  -- within one script by position. A clock that stepped back must not break that order, so continue
  -- after the newest id if it looks like one of ours.
  local high = math.floor(now / 1048576)
  local low = (now % 1048576) * 4096
  -- Also refuses a foreign type before anything is written.
  local tail = is_listed and redis.call('LINDEX', ordered, -1)
  if tail then
    local tail_high, tail_low = id_of(tail)
    if tail_high and tail_high - high < A_DAY_OF_IDS and (tail_high > high or (tail_high == high and tail_low >= low)) then
      high, low = tail_high, tail_low + 1
    end
  end

  local floor, char = math.floor, string.char
  local function byte_of(number, divisor) return floor(number / divisor) % 256 end
  local width, lengths = length_bytes(), {}
  local function length_field(size)
    local field = char(size % 256, byte_of(size, 256), byte_of(size, 65536), byte_of(size, 16777216))
    lengths[size] = width == 8 and field .. '\0\0\0\0' or field
    return lengths[size]
  end

  local ids, records, scored = {}, {}, {}
  local taken
  repeat
    -- The parts that neighbours share are made once: the upper six bytes of an id, and the length.
    local page, upper
    for i, payload in ipairs(payloads) do
      if low >= 4294967296 then high, low, page = high + 1, 0, nil end
      if floor(low / 65536) ~= page then
        page = floor(low / 65536)
        upper = char(byte_of(high, 16777216), byte_of(high, 65536), byte_of(high, 256), high % 256, floor(page / 256), page % 256)
      end
      local id = upper .. char(byte_of(low, 256), low % 256)
      ids[i] = id
      records[i] = '\8' .. id .. (lengths[#payload] or length_field(#payload)) .. payload
      low = low + 1
    end
    -- No id is in use twice, even if the clock has stepped back.
    taken = false
    for _, score in ipairs(redis.call('ZMSCORE', timeout, unpack(records))) do taken = taken or score end
  until not taken

  for i, due in ipairs(dues) do
    scored[i * 2 - 1], scored[i * 2] = due, records[i]
  end
  -- First the write whose right cannot be tried: if it is refused, nothing is written.
  if is_listed then redis.call('RPUSH', ordered, unpack(records)) end
  redis.call('ZADD', timeout, unpack(scored))
  return ids
end
