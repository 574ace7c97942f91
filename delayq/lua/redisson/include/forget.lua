-- forget: remove records from the ordered list, without walking through it for each. Needs record.
--
-- The list is in offer order, and our ids sort by offer order. So due records often lie together at
-- one end. Any other record is found by its id, like a name in a telephone book: where its time
-- should be, then nearer and nearer. Every record found is overwritten with a mark, and one pass
-- removes the marks. Java's ids are random, so they are skipped, and a record that cannot be found
-- in this way is searched for by LREM, as Redisson does; many such records are searched for in one
-- walk. LREM also takes a few records from a short list: finding one here takes as long as comparing
-- ten thousand of them there.
local LOOK_AROUND = 24
local FEW_COMPARISONS = 8192

-- Remove the run of `gone` records at one end. Return its length.
local function pop_run(gone, most, at_head)
  local records = redis.call('LRANGE', ordered, at_head and 0 or -most, at_head and most - 1 or -1)
  local run = 0
  while run < #records do
    local record = records[at_head and run + 1 or #records - run]
    if not gone[record] then break end
    gone[record] = nil
    run = run + 1
  end
  -- Not LPOP, which would return the records.
  if run > 0 then redis.call('LTRIM', ordered, at_head and run or 0, at_head and -1 or -run - 1) end
  return run
end

-- Return the first entry of `window`, from its start or end, whose id lies between those of the
-- bounds `from` and `to`: its index in the list, high, low. Other entries are foreign.
local function bound_in(window, first, from, to, at_start)
  for step = 1, #window do
    local index = at_start and step or #window - step + 1
    local high, low = id_of(window[index])
    if high and (high > from[2] or (high == from[2] and low >= from[3]))
      and (high < to[2] or (high == to[2] and low <= to[3])) then
      return {first + index - 1, high, low}
    end
  end
  return nil
end

-- Return the index of a record between the bounds {index, high, low}; nil if it is not found.
local function find_index(record, high, low, from, to)
  local moved, reach = nil, LOOK_AROUND
  for round = 1, 60 do
    local gap = to[1] - from[1] - 1
    if gap < 1 then return nil end
    local guess
    if round > 2 and round % 2 == 1 then
      -- Offers come in bursts, so two guesses by time may be off on the same side, and so may all that
      -- follow. Go farther and farther from the last one, halfway at most: then each of these rounds
      -- halves what is left, or brackets the record closely.
      reach = reach * 4
      local step = math.min(reach, math.floor(gap / 2))
      guess = moved == 'to' and to[1] - 1 - step or from[1] + 1 + step
    else
      local share = ((high - from[2]) * 4294967296 + (low - from[3])) / ((to[2] - from[2]) * 4294967296 + (to[3] - from[3]))
      if not (share >= 0 and share <= 1) then share = 0.5 end
      guess = from[1] + 1 + math.floor(share * (gap - 1))
    end
    -- Getting there has a cost, so look as far around as a guess at random offers is off.
    local around = math.min(LOOK_AROUND, 2 + math.ceil(math.sqrt(guess - from[1])))
    local first = math.max(from[1] + 1, guess - around)
    local window = redis.call('LRANGE', ordered, first, math.min(to[1] - 1, guess + around))
    for index, found in ipairs(window) do
      if found == record then return first + index - 1 end
    end
    local start, stop = bound_in(window, first, from, to, true), bound_in(window, first, from, to, false)
    if not start then return nil end
    if high < start[2] or (high == start[2] and low < start[3]) then
      to, moved = start, 'to'
    elseif high > stop[2] or (high == stop[2] and low > stop[3]) then
      from, moved = stop, 'from'
    else
      return nil -- it belongs here, but it is missing
    end
  end
  return nil
end

local function remove_from_list(records, now)
  local length = redis.call('LLEN', ordered)
  local gone = {}
  for _, record in ipairs(records) do gone[record] = true end
  local left = #records
  if length == 0 or left == 0 then return end
  local run = pop_run(gone, left, true)
  left, length = left - run, length - run
  if left == 0 or length == 0 then return end
  run = pop_run(gone, left, false)
  left, length = left - run, length - run
  if left == 0 or length == 0 then return end

  if left * length <= FEW_COMPARISONS then
    for _, record in ipairs(records) do
      if gone[record] then redis.call('LREM', ordered, 1, record) end
    end
    return
  end

  -- Most calls end above, so these are here.
  local FOUR_YEARS, A_DAY = 134217728, 82397 -- in units of an id's upper half (2^20 microseconds)
  -- From this number of records on, a walk through the whole list costs less than an LREM for each.
  local MANY = 50
  local PAGE = 1000
  -- Not a record: those have at least 12 bytes of header, the first of which are an id's.
  local GONE = 'delayq:gone'
  local searched = {}
  for _, record in ipairs(records) do
    if gone[record] then
      local high, low = id_of(record)
      searched[#searched + 1] = {high or -1, low or 0, record}
    end
  end
  table.sort(searched, function(a, b) return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2]) end)

  -- Our ids are from recent years, and a clock that stepped back may have left some from tomorrow.
  local present = math.floor(now / 1048576)
  local from, last = {-1, present - FOUR_YEARS, 0}, {length, present + A_DAY, 0}
  from = bound_in(redis.call('LRANGE', ordered, 0, LOOK_AROUND), 0, from, last, true) or from
  local tail = redis.call('LRANGE', ordered, -LOOK_AROUND, -1)
  last = bound_in(tail, length - #tail, from, last, false) or last
  local marks, first_mark, last_mark = 0, length, -1
  local function mark(at)
    redis.call('LSET', ordered, at, GONE)
    marks, first_mark, last_mark = marks + 1, math.min(first_mark, at), math.max(last_mark, at)
  end
  local unknown = {}
  for _, wanted in ipairs(searched) do
    local high, low, record = wanted[1], wanted[2], wanted[3]
    local at = high >= from[2] and high <= last[2] and find_index(record, high, low, from, last)
    if at then
      mark(at)
      from = {at, high, low}
    else
      unknown[#unknown + 1] = record
    end
  end
  if #unknown >= MANY then
    local wanted, missing = {}, #unknown
    for _, record in ipairs(unknown) do wanted[record] = true end
    for first = 0, length - 1, PAGE do
      if missing == 0 then break end
      for index, record in ipairs(redis.call('LRANGE', ordered, first, first + PAGE - 1)) do
        if wanted[record] then
          wanted[record], missing = nil, missing - 1
          mark(first + index - 1)
        end
      end
    end
    unknown = {}
  end
  if marks > 0 then
    -- Begin at the end that is nearer to the marks.
    redis.call('LREM', ordered, last_mark < length - first_mark and marks or -marks, GONE)
  end
  for _, record in ipairs(unknown) do redis.call('LREM', ordered, 1, record) end
end
