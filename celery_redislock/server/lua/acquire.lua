-- Take the lock if it is free, already mine, or left to me.
--
-- KEYS[1]  the lock
-- ARGV[1]  flags: the letters of what is given besides, see below
-- ARGV[2]  the owner that I am
-- ARGV[3]  the token that the lock is to hold; mine, or one that my caller wants it to hold
-- ARGV[4]  the lease in milliseconds; empty: for ever
-- n key    the note of my attempt; given only where this message may be a copy
-- f key    the lock's last fence; given only where a fence is asked for
-- w key    who waits for the lock; given where I wait
-- w value  how long a waiter is remembered, in milliseconds
-- s key    who waits for the lock; given where I have waited, and wait no longer
-- c key    the place of the one message that may wait in the queue; given only with a claim
-- c value  my claim: the owner to whom the lock, or the place in the queue, was left for my message
-- c value  how long I keep that place from now on if I am not granted the lock, in milliseconds
--
-- Returns 1: granted, the lock holds the token for the lease
--         more than 1: granted, and this is my fence
--         0: my attempt has already finished elsewhere
--         {holder's token, milliseconds left or -1}: held by another

local lock, owner, token, lease = KEYS[1], ARGV[2], ARGV[3], ARGV[4]
local note, fence, waiters, remembered, left, place, claim, place_ttl
if ARGV[1] ~= '' then
  keys_read, values_read = 1, 4
  note, fence = optional_key('n'), optional_key('f')
  waiters, remembered, left = optional_key('w'), optional_value('w'), optional_key('s')
  place, claim, place_ttl = optional_key('c'), optional_value('c'), optional_value('c')
end

local function store(mode)
  if lease == '' then
    return redis.call('SET', lock, token, mode)
  end
  return redis.call('SET', lock, token, mode, 'PX', lease)
end

if note and redis.call('EXISTS', note) == 1 then
  if is_owned_by(owner, redis.call('GET', lock)) then
    redis.call('DEL', lock)  -- granted before the note was left, the answer lost
  end
  return 0
end
local is_free = store('NX')
if is_free and ARGV[1] == '' then
  return 1
end

local function keeps_its_place()
  return claim and is_owned_by(claim, redis.call('GET', place))
end

local function wait_no_longer()
  if waiters or left then
    redis.call('SREM', waiters or left, owner)
  end
end

-- Greater than every fence before it, also where the last one was lost: a clock's microseconds outrun a counter.
local function next_fence(last)
  local time = redis.call('TIME')
  local number = string.format('%.0f', math.max(time[1] * 1000000 + time[2], (last or 0) + 1))
  redis.call('SET', fence, number, 'EX', 86400)
  return tonumber(number)
end

local function granted(again)
  wait_no_longer()
  if keeps_its_place() then
    redis.call('DEL', place)  -- from now on another message may wait
  end
  if not fence then
    return 1
  end
  local last = tonumber(redis.call('GET', fence))
  return again and last or next_fence(last)
end

if is_free then
  return granted(false)
end
local holder = redis.call('GET', lock)
local is_mine = is_owned_by(owner, holder)
if is_mine or claim and is_owned_by(claim, holder) then
  -- A failed acquire sends a release by its whole token. That release may arrive after this grant, so the lock must not
  -- hold that token any more, also where it is mine.
  store('XX')
  if string.sub(holder, 1, 1) == SEEN then
    mark(lock, token)
  end
  return granted(is_mine)
end

local attempt = attempt_of(token)
local is_copy = attempt and attempt == attempt_of(holder)
if is_copy and string.sub(holder, 1, 1) == COOLING then
  return 0
end
if waiters then
  redis.call('SADD', waiters, owner)
  redis.call('PEXPIRE', waiters, remembered)
else
  wait_no_longer()
end
if keeps_its_place() then
  redis.call('PEXPIRE', place, place_ttl)
end
if is_copy then
  mark(lock, holder)
end
return {holder, redis.call('PTTL', lock)}
