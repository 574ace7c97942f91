-- store: give messages their ids, and put them where they wait. Needs record.
--
-- `dues` (ms) and `payloads` stand in offer order. Without `listed` the ordered list is left out. Announces a new head on
-- `channel`. Returns the ids.
local MAX_MS = 9007199254740992 -- beyond 2^53 a score is no longer exact
local A_DAY_OF_IDS = 82397      -- in units of an id's upper half (2^20 microseconds)

local function store(timeout, ordered, channel, listed, now, dues, payloads)
  -- An id is the time in microseconds times 4096, big-endian: ids sort by offer order, within one script by position.
  -- A clock that stepped back must not break that order, so go on after the newest id if it looks like one of ours.
  local high = math.floor(now / 1048576)
  local low = (now % 1048576) * 4096
  local tail = listed and redis.call('LINDEX', ordered, -1) -- also refuses a foreign type before anything is written
  if tail then
    local tail_high, tail_low = id_of(tail)
    if tail_high and tail_high - high < A_DAY_OF_IDS and (tail_high > high or (tail_high == high and tail_low >= low)) then
      high, low = tail_high, tail_low + 1
    end
  end

  local function byte_of(number, divisor) return math.floor(number / divisor) % 256 end
  local function big_endian(number)
    return string.char(byte_of(number, 16777216), byte_of(number, 65536), byte_of(number, 256), number % 256)
  end
  local width = length_bytes()
  local function little_endian(number)
    local low_half = string.char(number % 256, byte_of(number, 256), byte_of(number, 65536), byte_of(number, 16777216))
    return width == 8 and low_half .. '\0\0\0\0' or low_half
  end

  local ids, records = {}, {}
  local earliest, earliest_due
  for i, due in ipairs(dues) do
    local id, record
    repeat
      if low >= 4294967296 then high, low = high + 1, 0 end
      id = big_endian(high) .. big_endian(low)
      record = '\8' .. id .. little_endian(#payloads[i]) .. payloads[i]
      low = low + 1
    until redis.call('ZADD', timeout, 'NX', string.format('%.0f', due), record) == 1
    ids[i], records[i] = id, record
    if not earliest or due < earliest_due then earliest, earliest_due = record, due end
  end
  if listed then redis.call('RPUSH', ordered, unpack(records)) end

  -- Tell the others only if they would wake too late.
  if redis.call('ZRANGE', timeout, 0, 0)[1] == earliest then
    redis.call('PUBLISH', channel, string.format('%.0f', earliest_due))
  end
  return ids
end
