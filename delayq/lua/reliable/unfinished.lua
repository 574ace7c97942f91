-- unfinished: list the batches that may still go on, a bounded number at a time.
--
-- Keys:
--   batch_members  ZSET  of include/batches.lua
-- Arguments:
--   after  text  go on behind this member of batch_members; empty: begin
--   limit  int   look at this many batches at most
-- Roles: admin
-- Repeatable: yes
--
-- Returns {after, dead, batch, ...}. after: where to go on, or empty if there are no more; dead: how
-- many dead letters all of these have had; the batches of which messages have not ended, or what
-- follows from them has not.
-- include: clock
-- include: leases
-- include: batches

local from = after == '' and '[\0' or '(' .. after
local members = redis.call('ZRANGEBYLEX', batch_members, from, '(\1', 'LIMIT', 0, limit)
local reply, dead_count = {#members == tonumber(limit) and members[#members] or '', 0}, 0
for _, member in ipairs(members) do
  local batch = string.sub(member, 19)
  if count_members(batch, 'o') + count_members(batch, 'f') > 0 then reply[#reply + 1] = batch end
  dead_count = dead_count + count_members(batch, 'd')
end
reply[2] = dead_count
return reply
