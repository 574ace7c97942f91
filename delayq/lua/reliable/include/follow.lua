-- follow: store the messages that follow from others. Needs clock, leases, groups, group_turns
-- and queue.
--
-- A follower travels as text: the length of its id and of its content, each followed by ":"; the id;
-- its priority, due time, time to live, time for which its id counts as taken, and what happens if
-- that is taken, as in offer.lua, each followed by a space; and the content. Several are put behind
-- each other.

-- Return the followers in a text: {id, priority, when, ttl_us, unique_us, on_duplicate, content} of
-- each.
local function parse_followers(text)
  local followers, at = {}, 1
  while at <= #text do
    local id_length, length, begin = string.match(text, '^(%d+):(%d+):()', at)
    local behind_id = begin + tonumber(id_length)
    local priority, when, ttl_us, unique_us, on_duplicate, content_at =
      string.match(text, '^(%d) (@?[%de]+) (%d+) (%d+) (%a+) ()', behind_id)
    at = content_at + tonumber(length)
    local content = string.sub(text, content_at, at - 1)
    followers[#followers + 1] = {
      id = string.sub(text, begin, behind_id - 1), priority = tonumber(priority), when = when,
      ttl_us = tonumber(ttl_us), unique_us = tonumber(unique_us), on_duplicate = on_duplicate,
      content = content,
    }
  end
  return followers
end

-- Store a follower, unless a message has its id, and return whether it was stored. A limit of how many
-- messages the queue has does not hold it back: its predecessor has left.
local function store_follower(follower, now)
  local id, content = follower.id, follower.content
  local known = find_message(id, now)
  if known and known.expired then
    free_id(id, known, now)
    known = nil
  end
  if known and (known.leased or follower.on_duplicate ~= 'replace') then return false end
  if known then
    content = with_batch(content, redis.call('HGET', bodies, id))
    delete_message(id, known.where)
  end
  local moment = moment_in(follower.when)
  local delay = moment and math.max(0, moment - now) or tonumber(follower.when)
  local expires = follower.ttl_us > 0 and format_score(now + follower.ttl_us)
  local times = string.format('%016.0f', now) .. (delay > 0 and '+' .. (moment and string.format('%.0f', delay) or follower.when) or '')
  redis.call('HSET', bodies, id, times .. content)
  if follower.priority > 0 then redis.call('HSET', priorities, id, follower.priority) end
  if expires then
    redis.call('HSET', expiries, id, expires)
    redis.call('ZADD', expiry_index, expires, id)
  end
  local group = group_in(content)
  if group then
    enqueue_in_group(id, group, tostring(9 - follower.priority), now + delay)
    update_turns({group}, now)
  else
    enqueue(id, follower.priority, now + delay, now)
  end
  return true
end
