-- offer: store messages, each due after its own delay.
--
-- KEYS[1]  timeout  ZSET     records, scored by due time, ms
-- KEYS[2]  ordered  LIST     the same records in offer order
-- KEYS[3]  channel  CHANNEL  where a new head is announced: its due time, ms
-- ARGV[...]  delay_us, payload  for each message
--
-- Returns {length_bytes, id, due_ms, id, due_ms, ...}: what a receipt needs to name its record again.
-- include: clock
-- include: record

local MAX_MS = 9007199254740992 -- beyond 2^53 a score is no longer exact
local A_DAY = 82397             -- in units of an id's upper half (2^20 microseconds)

local now = now_us()
local dues = {}
for i = 1, #ARGV, 2 do
  local delay = tonumber(ARGV[i])
  local due = delay and delay >= 0 and due_ms(now, delay)
  if not due or due > MAX_MS then return redis.error_reply('DELAYQ_DELAY delay out of range') end
  dues[#dues + 1] = due
end

-- An id is the time in microseconds times 4096, big-endian: ids sort by offer order, within one script by position.
-- A clock that stepped back must not break that order, so go on after the newest id if it looks like one of ours.
local high = math.floor(now / 1048576)
local low = (now % 1048576) * 4096
local tail = redis.call('LINDEX', KEYS[2], -1) -- also refuses a key of a foreign type before anything is written
if tail then
  local tail_high, tail_low = id_of(tail)
  if tail_high and tail_high - high < A_DAY and (tail_high > high or (tail_high == high and tail_low >= low)) then
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

local reply = {width}
local records = {}
local earliest, earliest_due
for i, due in ipairs(dues) do
  local payload = ARGV[i * 2]
  local id, record
  repeat
    if low >= 4294967296 then high, low = high + 1, 0 end
    id = big_endian(high) .. big_endian(low)
    record = '\8' .. id .. little_endian(#payload) .. payload
    low = low + 1
  until redis.call('ZADD', KEYS[1], 'NX', string.format('%.0f', due), record) == 1
  records[i] = record
  reply[#reply + 1] = id
  reply[#reply + 1] = due
  if not earliest or due < earliest_due then earliest, earliest_due = record, due end
end
redis.call('RPUSH', KEYS[2], unpack(records))

-- Tell the others only if they would wake too late.
if redis.call('ZRANGE', KEYS[1], 0, 0)[1] == earliest then
  redis.call('PUBLISH', KEYS[3], string.format('%.0f', earliest_due))
end
return reply
