-- store: give messages their ids, and store them as pending. Needs record.
local MAX_MS = 9007199254740992 -- beyond 2^53 a score is no longer exact
local A_DAY_OF_IDS = 82397      -- in units of an id's upper half (2^20 microseconds)

-- Announce the due time of a new message if it is a new head, because the others would wake too
-- late otherwise. Redisson's clients have no other way to learn of it, so a user who may not
-- publish is refused: call this before anything is written.
local function announce(due)
  local head = redis.call('ZRANGE', timeout, 0, 0, 'WITHSCORES')[2]
  if not head or due < tonumber(head) then redis.call('PUBLISH', channel, string.format('%.0f', due)) end
end

-- Store messages in offer order. `scored` has the due time (ms) and the payload of each, the first
-- payload at the index `first`; the payloads are replaced by the records. Without `is_listed`, the
-- ordered list is left out. Return the first id. Each further one is the next number.
local function store(is_listed, now, scored, first)
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

  local records, taken = {}, nil
  repeat
    -- The parts that neighbours share are made once: all of an id but its last byte, and the
    -- length.
    local count, start = 0, nil
    for at = first, #scored, 2 do
      if low >= 4294967296 then high, low = high + 1, 0 end
      local last = low % 256
      if not start or last == 0 then
        start = char(8, byte_of(high, 16777216), byte_of(high, 65536), byte_of(high, 256), high % 256, byte_of(low, 16777216), byte_of(low, 65536), byte_of(low, 256))
      end
      local payload = taken and string.sub(scored[at], 10 + width) or scored[at]
      local record = start .. char(last) .. (lengths[#payload] or length_field(#payload)) .. payload
      count = count + 1
      records[count], scored[at] = record, record
      low = low + 1
    end
    -- No id is in use twice, even if the clock has stepped back.
    taken = false
    for _, score in ipairs(redis.call('ZMSCORE', timeout, unpack(records))) do taken = taken or score end
  until not taken

  -- First the write whose right cannot be tried: if it is refused, nothing is written.
  if is_listed then redis.call('RPUSH', ordered, unpack(records)) end
  if is_listed and type(redis.pcall('ZADD', timeout, unpack(scored, first - 1))) == 'table' then
    -- Without a due time, they would stay for good.
    redis.call('LTRIM', ordered, 0, -#records - 1)
    is_listed = false
  end
  if not is_listed then redis.call('ZADD', timeout, unpack(scored, first - 1)) end
  return string.sub(records[1], 2, 9)
end
