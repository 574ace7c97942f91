-- forget: take one record out of the ordered list.
--
-- The list is in offer order and ids sort by time, so messages with one delay leave at the head, and an id says which end is nearer.
local function forget(ordered, record)
  local head = redis.call('LINDEX', ordered, 0)
  if not head then return end
  if head == record then
    redis.call('LPOP', ordered)
    return
  end
  local tail = redis.call('LINDEX', ordered, -1)
  if tail == record then
    redis.call('RPOP', ordered)
    return
  end
  local from = 1
  local high, low = id_of(record)
  local first_high, first_low = id_of(head)
  local last_high, last_low = id_of(tail)
  if high and first_high and last_high then
    local to_head = (high - first_high) * 4294967296 + (low - first_low)
    local to_tail = (last_high - high) * 4294967296 + (last_low - low)
    if to_tail < to_head then from = -1 end
  end
  redis.call('LREM', ordered, from, record)
end
