-- due_counts: count the messages that come due between moments.
--
-- Keys:
--   set...   ZSETs of waiting messages by due time
-- Arguments:
--   edge...  moments in the unit of the sets, in order
-- Roles: admin, dashboard
-- Repeatable: yes
--
-- Returns a number for each edge: of the messages that are due after it and, unless it is the last
-- one, no later than the next.

local counts = {}
for number, edge in ipairs(edges) do
  counts[number] = 0
  for _, set in ipairs(sets) do
    local count = redis.call('ZCOUNT', set, '(' .. edge, edges[number + 1] or '+inf')
    counts[number] = counts[number] + count
  end
end
return counts
