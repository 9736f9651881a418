-- Take the lock if it is free or already mine.
--
-- KEYS[1]  the lock
-- KEYS[2]  the note of my attempt; given only where this message may be a copy
-- ARGV[1]  my nonce
-- ARGV[2]  my token: "<nonce> <attempt> ..."
-- ARGV[3]  the lease in milliseconds
--
-- Returns 1: granted, the lock holds my token for the lease
--         0: my attempt has already finished elsewhere
--         {holder's token, milliseconds left or -1}: held by another

local function is_mine(holder)
  return holder and (holder == ARGV[1] or string.sub(holder, 1, #ARGV[1] + 1) == ARGV[1] .. ' ')
end

if KEYS[2] and redis.call('EXISTS', KEYS[2]) == 1 then
  if is_mine(redis.call('GET', KEYS[1])) then
    redis.call('DEL', KEYS[1])  -- granted before the note was left, the answer lost
  end
  return 0
end
if redis.call('SET', KEYS[1], ARGV[2], 'NX', 'PX', ARGV[3]) then
  return 1
end
local holder = redis.call('GET', KEYS[1])
if is_mine(holder) then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return 1
end

-- A copy of the holder's own message: leave a mark on the lock, so that its release leaves a note for me.
local attempt = string.match(ARGV[2], '^%S+ (%S+)')
if attempt and attempt ~= '*' and attempt == string.match(holder, '^%S+ (%S+)')
    and string.sub(holder, -5) ~= ' copy' then
  redis.call('SET', KEYS[1], holder .. ' copy', 'KEEPTTL')
end
return {holder, redis.call('PTTL', KEYS[1])}
