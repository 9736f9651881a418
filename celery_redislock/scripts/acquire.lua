-- Take the lock if it is free or already mine.
--
-- KEYS[1]  the lock
-- KEYS[2]  the note of my attempt; given only where this message may be a copy
-- KEYS[3]  the lock's last fence; given only where a fence is asked for
-- KEYS[4]  who waits for the lock; given only by those who wait
--          The lock again stands for what is not given but followed by others.
-- ARGV[1]  my nonce
-- ARGV[2]  my token: "<nonce> <attempt> ..."
-- ARGV[3]  the lease in milliseconds; empty: for ever
-- ARGV[4]  how long a waiter is remembered, in milliseconds; empty: I wait no longer
--
-- Returns 1: granted, the lock holds my token for the lease
--         more than 1: granted, and this is my fence
--         0: my attempt has already finished elsewhere
--         {holder's token, milliseconds left or -1}: held by another

local lock, nonce, lease = KEYS[1], ARGV[1], ARGV[3]
local waiters = KEYS[4]

local function is_mine(holder)
  return holder and (holder == nonce or string.sub(holder, 1, #nonce + 1) == nonce .. ' ')
end

-- Greater than every fence before it, also where the last one was lost: a clock's microseconds outrun a counter.
local function next_fence(last)
  local time = redis.call('TIME')
  local fence = string.format('%.0f', math.max(time[1] * 1000000 + time[2], (last or 0) + 1))
  redis.call('SET', KEYS[3], fence, 'EX', 86400)
  return tonumber(fence)
end

local function granted(again)
  if waiters then
    redis.call('SREM', waiters, nonce)
  end
  if not KEYS[3] or KEYS[3] == lock then
    return 1
  end
  local last = tonumber(redis.call('GET', KEYS[3]))
  return again and last or next_fence(last)
end

if KEYS[2] and KEYS[2] ~= lock and redis.call('EXISTS', KEYS[2]) == 1 then
  if is_mine(redis.call('GET', lock)) then
    redis.call('DEL', lock)  -- granted before the note was left, the answer lost
  end
  return 0
end
local free
if lease == '' then
  free = redis.call('SET', lock, ARGV[2], 'NX')
else
  free = redis.call('SET', lock, ARGV[2], 'NX', 'PX', lease)
end
if free then
  return granted(false)
end
local holder = redis.call('GET', lock)
if is_mine(holder) then
  if lease ~= '' then
    redis.call('PEXPIRE', lock, lease)
  end
  return granted(true)
end

if waiters and ARGV[4] ~= '' then
  redis.call('SADD', waiters, nonce)
  redis.call('PEXPIRE', waiters, ARGV[4])
elseif waiters then
  redis.call('SREM', waiters, nonce)
end
-- A copy of the holder's own message: leave a mark on the lock, so that its release leaves a note for me.
local attempt = string.match(ARGV[2], '^%S+ (%S+)')
if attempt and attempt ~= '*' and attempt == string.match(holder, '^%S+ (%S+)')
    and string.sub(holder, -5) ~= ' copy' then
  redis.call('SET', lock, holder .. ' copy', 'KEEPTTL')
end
return {holder, redis.call('PTTL', lock)}
