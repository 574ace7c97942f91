-- starts: take back the starts of messages that no handler has begun. Needs groups and queue.
--
-- Starts are numbered, so those that follow get lower numbers.

-- Note in `counts` that a message goes back that was handed out at this moment.
local function note_unstarted(counts, id, moment)
  local position = redis.call('HGET', positions, id)
  for _, group in ipairs({'', position and group_of(position) or nil}) do
    local prefix = group .. '\0' .. format_moment19(tonumber(moment)) .. ' '
    if not counts[prefix] then counts[#counts + 1], counts[prefix] = {prefix = prefix, group = group, number = 0}, #counts + 1 end
    local count = counts[counts[prefix]]
    count.number = count.number + 1
  end
end

-- Take back one number of starts of a group. Return false if nothing is to be changed.
local function without_starts(count)
  local members = redis.call('ZRANGEBYLEX', rate_log, '[' .. count.prefix, '(' .. count.group .. '\0:', 'LIMIT', 0, 201)
  -- It may count no more; or the clock was set back; or too many have followed: then it has started.
  if #members > 200 or string.sub(members[1] or '', 1, #count.prefix) ~= count.prefix then return false end
  local changed, first_total = {}, nil
  for _, member in ipairs(members) do
    local head, before, total, expired = string.match(member, '^(%S+ %S+) (%d+) (%d+) (%d+)$', #count.group + 2)
    if not head then return false end
    before, total, expired = tonumber(before), tonumber(total), tonumber(expired)
    if first_total then
      before = before - count.number
    else
      first_total, count.number = total, math.min(count.number, total - before)
    end
    if expired >= first_total then expired = expired - count.number end
    total = total - count.number
    if total > before then
      changed[#changed + 1], changed[#changed + 2] = 0, count.group .. '\0' .. head .. ' ' .. before .. ' ' .. total .. ' ' .. expired
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
