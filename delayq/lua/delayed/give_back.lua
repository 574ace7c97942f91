-- give_back: put payloads that were taken, but reached nobody, back at the head of the ready list.
--
-- KEYS[1]  ready   LIST    payloads that are due
-- KEYS[2]  marker  STRING  says that this very call was carried out: a repetition after a lost answer does nothing
-- ARGV[...]  payload  in the order in which they shall be taken again
--
-- Returns 1 when they were put back, 0 when an earlier try had done so.

redis.call('LLEN', KEYS[1])
if not redis.call('SET', KEYS[2], '', 'NX', 'PX', 60000) then return 0 end
for i = #ARGV, 1, -1 do redis.call('LPUSH', KEYS[1], ARGV[i]) end
return 1
