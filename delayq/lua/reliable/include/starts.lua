-- starts: take back the starts of messages that no handler has begun. Needs groups and queue.
--
-- Starts are numbered, so those that follow get lower numbers.

-- Note in `counts` that a message goes back that was handed out at this moment.
local function note_unstarted(counts, id, moment)
  local place = redis.call('HGET', positions, id)
  for _, group in ipairs({'', place and group_of(place) or nil}) do
    local own = group .. '\0' .. format_moment19(tonumber(moment)) .. ' '
    if not counts[own] then counts[#counts + 1], counts[own] = {own = own, group = group, number = 0}, #counts + 1 end
    local count = counts[counts[own]]
    count.number = count.number + 1
  end
end

-- Take back one number of starts of a group. Return false if nothing is to be changed.
local function without_starts(count)
  local members = redis.call('ZRANGEBYLEX', rate_log, '[' .. count.own, '(' .. count.group .. '\0:', 'LIMIT', 0, 201)
  -- It may count no more; or the clock was set back; or too many have followed: then it has started.
  if #members > 200 or string.sub(members[1] or '', 1, #count.own) ~= count.own then return false end
  local changed, first_after = {}, nil
  for _, member in ipairs(members) do
    local head, before, after, over = string.match(member, '^(%S+ %S+) (%d+) (%d+) (%d+)$', #count.group + 2)
    if not head then return false end
    before, after, over = tonumber(before), tonumber(after), tonumber(over)
    if first_after then
      before = before - count.number
    else
      first_after, count.number = after, math.min(count.number, after - before)
    end
    if over >= first_after then over = over - count.number end
    after = after - count.number
    if after > before then
      changed[#changed + 1], changed[#changed + 2] = 0, count.group .. '\0' .. head .. ' ' .. before .. ' ' .. after .. ' ' .. over
    end
  end
  return members, changed
end

-- Take back the starts that were noted, before their messages go back: their turns depend on it.
local function take_back_starts(counts)
  demand_removal()
  for _, count in ipairs(counts) do
    local members, changed = without_starts(count)
    if members then
      -- In this order, the set is not empty in between, and keeps its time to live.
      if #changed > 0 then redis.call('ZADD', rate_log, unpack(changed)) end
      redis.call('ZREM', rate_log, unpack(members))
    end
  end
end
