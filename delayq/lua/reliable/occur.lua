-- occur: enqueue the occurrences that follow these, which are about to be handed to workers.
--
-- Keys:
--   messages   see include/queue.lua
--   settings   HASH     see include/settings.lua
--   wake       CHANNEL  where a new head is announced: its due time, microseconds
--   schedules  HASH     name to the facts about the schedule: see include/schedule.lua
-- Arguments:
--   id...     text  of each occurrence
--   token...  text  of its lease
-- Roles: consumer
-- Repeatable: yes
--
-- Returns {1 or 0, left, ...} for each occurrence: 0 if it is not to be handed out, because the one
-- before it is still alive, and it is deleted, or because it is not leased under that token any
-- more. left: the number of moments known beyond the next one; -1 if that does not matter, -2 if
-- there is no such schedule.
-- include: clock
-- include: leases
-- include: groups
-- include: group_turns
-- include: queue
-- include: schedule

check_messages()
local now = now_us()
local shift = clock_shift()
local reply = {}
for at = FIRST, #ARGV, STRIDE do
  local id, token = ARGV[at + ID], ARGV[at + TOKEN]
  local name, moment = string.match(id, '^(.*)@(%d+)$')
  local facts, content
  if name and name ~= '' then facts, content = load_schedule(name) end
  local is_known = facts or name and last_of_ended(name, now) == moment
  local may_go_out, left = lease_end(id, token) ~= nil, is_known and -1 or -2
  if may_go_out and facts and facts.next == moment then
    if find_occurrence(name, facts.last, now) then
      may_go_out = false
      delete_message(id, 'leased')
    else
      facts.last = moment
    end
    -- An occurrence that was brought forward must not come a second time.
    skip_to_after(facts, math.max(now + shift, tonumber(moment)))
    enqueue_next(name, facts, content, now, shift)
    save_schedule(name, facts, content)
    if tonumber(facts.every) == 0 then left = #facts.upcoming end
  end
  reply[#reply + 1] = may_go_out and 1 or 0
  reply[#reply + 1] = left
end
return reply
