-- Say of a lock of mine that a copy of its message is to come, so that its release leaves a note for it.
--
-- KEYS[1]  the lock
-- ARGV[1]  my nonce
--
-- Returns 1: said
--         0: it is not mine (any more)

local holder = redis.call('GET', KEYS[1])
if not holder or string.sub(holder, 1, #ARGV[1] + 1) ~= ARGV[1] .. ' ' then
  return 0
end
if string.sub(holder, -5) ~= ' copy' then
  redis.call('SET', KEYS[1], holder .. ' copy', 'KEEPTTL')
end
return 1
