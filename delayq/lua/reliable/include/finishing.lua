-- finishing: find the messages that have been handled, and are to be deleted by finished.lua. Needs
-- clock, leases and records. Ends the script if there are none; leaves `reply`, with 1 for each
-- message that was ours, and `now`.

local now, ids = now_us(), {}
for at = FIRST, #ARGV, STRIDE do ids[#ids + 1] = ARGV[at + ID] end
local some_details = redis.call('EXISTS', sparse_hashes()) > 0
local ends = read_leases(ids, runs, some_details)
local keep_us, most = read_keep()
local remember_us = number_or(0, redis.call('HGET', settings, 'dedup_window'))
local some_await = redis.call('EXISTS', awaited) == 1
-- A key of a foreign type must fail before the first write.
check_records()
if some_details then check_details() end
if some_await then redis.call('ZSCORE', awaited, '') end
if remember_us > 0 then redis.call('ZSCORE', remembered, '') end
local reply, finished, new, seen = {}, {}, {}, {}
for i, id in ipairs(ids) do
  local is_ours = ends[i] and not seen[id]
  reply[i] = is_ours and 1 or 0
  if is_ours then
    seen[id], finished[#finished + 1] = true, id
    if keep_us > 0 then
      local at = FIRST + (i - 1) * STRIDE
      local offered, result, rows, count = ARGV[at + OFFERED], ARGV[at + RESULT], '', 0
      if ARGV[at + AGAIN] == '1' then rows, count = recorded_attempts(id, offered) end
      local state = result == '' and 'done' or 'result'
      new[#new + 1] = id
      new[#new + 1] = format_record(state, offered, rows, count, ARGV[at + ATTEMPT], string.sub(result, 2), now)
    end
  end
end
if #finished == 0 then return reply end
