-- checkpoint: the saved state of a handler, and its report of how far it is, in one text.
--
-- A report stands in front, as "p", its length, and a colon. It is the moment of the report,
-- microseconds, a space, and JSON.

-- Return the report and the checkpoint in a text that is stored, or in none; each is empty if it is
-- missing.
local function split_checkpoint(text)
  local length, begin = string.match(text or '', '^p(%d+):()')
  if not length then return '', text or '' end
  local behind = begin + tonumber(length)
  return string.sub(text, begin, behind - 1), string.sub(text, behind)
end

local function with_progress(report, checkpoint)
  if report == '' then return checkpoint end
  return 'p' .. #report .. ':' .. report .. checkpoint
end
