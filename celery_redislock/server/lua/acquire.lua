-- Acquire a lock's key if the key is free, is mine already, or is reserved for my message. "I" am the execution, the
-- publish or the `Lock` that asks.
--
-- KEYS[1]  the key of the lock
-- ARGV[1]  flags: the letters of the options below that are given
-- ARGV[2]  my owner: the first part of my token, by which the scripts know me
-- ARGV[3]  the token that the key is to hold; my own, or one that the caller of a `Lock` has chosen
-- ARGV[4]  the lease in milliseconds; empty: the key never expires
-- n key    the note of my attempt; given only where my message may be a copy
-- f key    the last fence of the lock; given only where a fence is asked for
-- w key    the set of those who wait for the lock; given where I will wait if the key is held
-- w value  how long that set remembers a waiter, in milliseconds
-- s key    the set of those who wait for the lock; given where I have waited, and do not wait any longer
-- c key    the place of the one message that may wait in the queue; given only where my message carries a claim
-- c value  the owner in my message's reservation of the key or of the place; it is made of the claim
-- c value  how long the place is reserved from now on if the key is not granted, in milliseconds
--
-- Returns 1: the key was granted, and holds the token for the lease
--         more than 1: the key was granted, and this number is my fence
--         0: my attempt has already ended in another execution
--         {holder's token, milliseconds that remain or -1}: the key is held by another

local lock, owner, token, lease = KEYS[1], ARGV[2], ARGV[3], ARGV[4]
local note, fence, waiters, remembered, waited, place, claim, place_ttl
if ARGV[1] ~= '' then
  keys_read, values_read = 1, 4
  note, fence = optional_key('n'), optional_key('f')
  waiters, remembered, waited = optional_key('w'), optional_value('w'), optional_key('s')
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
    redis.call('DEL', lock)  -- it was granted before the note was written, and that answer was lost
  end
  return 0
end
local is_free = store('NX')
if is_free and ARGV[1] == '' then
  return 1
end

local function has_its_place()
  return claim and is_owned_by(claim, redis.call('GET', place))
end

local function wait_no_longer()
  if waiters or waited then
    redis.call('SREM', waiters or waited, owner)
  end
end

-- A number greater than every fence before it, also where the key of the last fence has expired or was deleted: the
-- microseconds of the server's clock grow faster than any holders can follow each other.
local function next_fence(last)
  local time = redis.call('TIME')
  local number = string.format('%.0f', math.max(time[1] * 1000000 + time[2], (last or 0) + 1))
  redis.call('SET', fence, number, 'EX', 86400)
  return tonumber(number)
end

local function granted(again)
  wait_no_longer()
  if has_its_place() then
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
  -- Who gets no answer to an acquire sends a release by the whole token of that acquire. That release may arrive after
  -- this grant, so the key must not hold that token any more, even where its owner is me.
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
if has_its_place() then
  redis.call('PEXPIRE', place, place_ttl)
end
if is_copy then
  mark(lock, holder)
end
return {holder, redis.call('PTTL', lock)}
