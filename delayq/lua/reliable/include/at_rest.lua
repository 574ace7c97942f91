-- at_rest: refuse the call while the queue is moved to another number of partitions, because part of
-- it is out of reach then. Needs the key settings.
if string.find(redis.call('HGET', settings, 'partitions') or '', '?', 1, true) then
  return redis.error_reply('DELAYQ_SETTINGS the queue is being moved to another number of partitions: try again later')
end
