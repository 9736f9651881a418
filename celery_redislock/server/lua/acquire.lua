-- Take the lock if it is free, already mine, or left to me.
--
-- KEYS[1]  the lock
-- KEYS[2]  the note of my attempt; given only where this message may be a copy
-- KEYS[3]  the lock's last fence; given only where a fence is asked for
-- KEYS[4]  who waits for the lock; given only by those who wait
-- KEYS[5]  the place of the one message that may wait in the queue; given only with a claim
--          The lock again stands for what is not given but followed by others.
-- ARGV[1]  my nonce
-- ARGV[2]  my token: "<nonce> <attempt> ..."
-- ARGV[3]  the lease in milliseconds; empty: for ever
-- ARGV[4]  how long a waiter is remembered, in milliseconds; empty: I wait no longer
-- ARGV[5]  my claim: the nonce under which the lock, or the place in the queue, was left to my message
-- ARGV[6]  how long I keep that place from now on if I am not granted the lock, in milliseconds
--
-- Returns 1: granted, the lock holds my token for the lease
--         more than 1: granted, and this is my fence
--         0: my attempt has already finished elsewhere
--         {holder's token, milliseconds left or -1}: held by another

local lock, nonce, lease, claim = KEYS[1], ARGV[1], ARGV[3], ARGV[5]
local waiters = KEYS[4] ~= lock and KEYS[4]
local COPY, COOLING = ' copy', '='

local function belongs_to(owner, holder)
  return holder and (holder == owner or string.sub(holder, 1, #owner + 1) == owner .. ' ')
end

local function store(token, mode)
  if lease == '' then
    return redis.call('SET', lock, token, mode)
  end
  return redis.call('SET', lock, token, mode, 'PX', lease)
end

local function keeps_its_place()
  return claim and belongs_to(claim, redis.call('GET', KEYS[5]))
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
  if keeps_its_place() then
    redis.call('DEL', KEYS[5])  -- from now on another message may wait
  end
  if not KEYS[3] or KEYS[3] == lock then
    return 1
  end
  local last = tonumber(redis.call('GET', KEYS[3]))
  return again and last or next_fence(last)
end

if KEYS[2] and KEYS[2] ~= lock and redis.call('EXISTS', KEYS[2]) == 1 then
  if belongs_to(nonce, redis.call('GET', lock)) then
    redis.call('DEL', lock)  -- granted before the note was left, the answer lost
  end
  return 0
end
if store(ARGV[2], 'NX') then
  return granted(false)
end
local holder = redis.call('GET', lock)
local is_mine = belongs_to(nonce, holder)
if is_mine or claim and belongs_to(claim, holder) then
  -- Also where it is mine: the undo of an acquire that was not answered may still be on its way, and is by its token.
  store(ARGV[2] .. (string.sub(holder, -5) == COPY and COPY or ''), 'XX')
  return granted(is_mine)
end

local attempt = string.match(ARGV[2], '^%S+ (%S+)')
local is_copy = attempt and attempt ~= '*' and attempt == string.match(holder, '^%S+ (%S+)')
if is_copy and string.sub(holder, 1, 1) == COOLING then
  return 0
end
if waiters and ARGV[4] ~= '' then
  redis.call('SADD', waiters, nonce)
  redis.call('PEXPIRE', waiters, ARGV[4])
elseif waiters then
  redis.call('SREM', waiters, nonce)
end
if keeps_its_place() then
  redis.call('PEXPIRE', KEYS[5], ARGV[6])
end
-- A copy of the holder's own message: leave a mark on the lock, so that its release leaves a note for me.
if is_copy and string.sub(holder, -5) ~= COPY then
  redis.call('SET', lock, holder .. COPY, 'KEEPTTL')
end
return {holder, redis.call('PTTL', lock)}
