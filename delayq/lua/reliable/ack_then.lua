-- ack_then: delete messages that have been handled, as finish does, and store those that follow from
-- them, or from their batches.
--
-- Keys:
--   messages    see include/queue.lua
--   wake        CHANNEL  where a free slot, and a new head, is announced: its due time, microseconds
--   remembered  ZSET     ids that count as taken, scored by the end of that time, microseconds
--   records     see include/records.lua
--   awaited     ZSET     ids whose end clients wait for, scored by the end of that, microseconds
--   batches     see include/batches.lua
-- Arguments:
--   runs          text  how many of the messages in a row have the same token, and the token of their
--                       leases: "99:token 1:token"
--   id...         text  of each message
--   offered...    text  when it was offered, from its body
--   again...      int   1 if attempts may be recorded of it already, 0 if not
--   attempt...    text  JSON on one line, about the attempt that has finished it
--   result...     text  "=" and the result, or nothing if there is none
--   followers...  text  the messages that follow: see include/follow.lua
--   batch...       text  the batch that it belongs to, or follows from; or nothing
-- Roles: consumer
-- Repeatable: no
-- Stores: yes
--
-- Returns for each message: 1, or 0 if it is not leased under that token any more, and nothing was
-- changed.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue
-- include: records
-- include: follow
-- include: batches

local followers = {}
for at = FIRST, #ARGV, STRIDE do followers[#followers + 1] = parse_followers(ARGV[at + FOLLOWERS]) end
-- A key of a foreign type must fail before the first write.
check_messages()
check_batches()
redis.call('ZSCORE', remembered, '')
-- include: finishing

-- The followers come first. If a right is taken away just now, so that the rest is refused, the
-- message comes again, and its followers have the same ids: nothing is lost.
demand_removal()
for i, is_ours in ipairs(reply) do
  for _, follower in ipairs(is_ours == 1 and followers[i] or {}) do
    local counts = follower.on_duplicate == 'replace' or number_or(0, redis.call('ZSCORE', remembered, follower.id)) <= now
    if counts and store_follower(follower, now) and follower.unique_us > 0 then
      remember({follower.id}, now + follower.unique_us, now)
    end
  end
end
-- The caller names the batches, because bodies may be large.
local members = {}
for i, is_ours in ipairs(reply) do
  local at = FIRST + (i - 1) * STRIDE
  local batch = ARGV[at + BATCH]
  if is_ours == 1 and batch ~= '' then members[#members + 1] = {ids[i], 'h', batch} end
end
end_members(members, now)
-- include: finished

return reply
