-- record: read and write the form in which Redisson packs a payload. See docs/redis-data-model.md.
--
-- Plain string functions only: the same text runs with any C library and byte order.

-- A length is as wide as C's `unsigned long` there: 8 bytes, or 4 on 32-bit and Windows servers.
local function length_bytes()
  local is_known, width = pcall(function() return struct.size('L') end)
  return is_known and width or 8
end

-- Return the little-endian number of 4 or 8 bytes at `at`; nil if it is cut off, or larger than any
-- payload.
local function read_length(record, at, width)
  local b1, b2, b3, b4, b5, b6, b7, b8 = string.byte(record, at, at + width - 1)
  if not b4 then return nil end
  if width == 8 and (not b8 or b5 + b6 + b7 + b8 > 0) then return nil end
  return b1 + b2 * 256 + b3 * 65536 + b4 * 16777216
end

-- Lengths by their fields of 8 bytes: many messages have the same one.
local known_lengths = {}

-- Return the payload of a record in any of Redisson's four forms; nil if it has none of them.
local function payload_of(record)
  local size = #record
  if string.byte(record, 1) == 8 then
    local field = string.sub(record, 10, 17)
    local length = known_lengths[field]
    if not length then
      length = read_length(record, 10, 8) or math.huge
      known_lengths[field] = length
    end
    if length == size - 17 then return string.sub(record, 18) end
    if read_length(record, 10, 4) == size - 13 then return string.sub(record, 14) end
  end
  if read_length(record, 9, 8) == size - 16 then return string.sub(record, 17) end
  if read_length(record, 9, 4) == size - 12 then return string.sub(record, 13) end
  return nil
end

-- Return the id of a record in the current form as two 32-bit numbers, high and low; nil for any
-- other record. Numbers, because Lua compares strings by the server's locale.
local function id_of(record)
  local marker, a, b, c, d, e, f, g, h = string.byte(record, 1, 9)
  if marker ~= 8 or not h then return nil end
  return ((a * 256 + b) * 256 + c) * 256 + d, ((e * 256 + f) * 256 + g) * 256 + h
end
