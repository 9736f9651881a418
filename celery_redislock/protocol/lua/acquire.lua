-- Acquire a lock's key if the key is free and nobody stands in line for it, is mine already, is reserved for my message,
-- or is kept for my room. "I" am the execution, the publish or the `Lock` that asks.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of the rooms that wait for the lock
-- ARGV[1]  flags: the letters of the options below that are given
-- ARGV[2]  my owner: the first part of my token, by which the scripts know me
-- ARGV[3]  the token that the key is to hold; my own, or one that the caller of a `Lock` has chosen
-- ARGV[4]  the lease in milliseconds; empty: the key never expires
-- n key    the note of my attempt; given only where my message may be a copy
-- f key    the last fence of the lock; given only where a fence is asked for
-- w value  the token of the key while it is kept for me, whole; given only where I waited and was called
-- c key    the place of the one message that may wait in the queue; given only where my message carries a claim
-- c value  the owner in my message's reservation of the key or of the place; it is made of the claim
-- c value  how long the place is reserved from now on if the key is not granted, in milliseconds
--
-- Returns 1: the key was granted, and holds the token for the lease
--         more than 1: the key was granted, and this number is my fence
--         0: my attempt has already ended in another execution
--         {holder's token, milliseconds that remain or -1, microseconds of the server's clock}: the key is held by
--         another, or is kept for who stands in line
--
-- Sent twice: the second finds my token, and grants the key again. If I die after the grant, the lease ends the lock.
-- If the one whom a room has called dies before this, the room's key ends by itself.

-- The most frequent case, in which the key is free and nobody waits, comes before the prelude: to make the functions of
-- the prelude takes longer than this.
if ARGV[1] == '' and ARGV[4] ~= '' and redis.call('EXISTS', KEYS[2]) == 0 then
  if redis.call('SET', KEYS[1], ARGV[3], 'NX', 'PX', ARGV[4]) then
    return 1
  end
end

-- So does the case of a job: the key, or the place in the queue and a free key, is reserved for my message.
if ARGV[1] == 'c' and ARGV[4] ~= '' then
  local _, _, queued = unpack(KEYS)
  local _, _, _, _, claim = unpack(ARGV)
  local function is_reserved(value)
    return value and string.sub(value, 1, 1) == '~' and string.sub(value, 1, 24) == claim .. ' '
  end
  local holder, place = redis.call('GET', KEYS[1]), redis.call('GET', queued)
  local is_free = not holder and redis.call('EXISTS', KEYS[2]) == 0
  if (is_free or is_reserved(holder)) and (not place or is_reserved(place)) then
    redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
    if place then
      redis.call('DEL', queued)  -- from now on another message may wait
    end
    return 1
  end
end

-- The prelude stands here.

local lock, line, owner, token, lease = KEYS[1], KEYS[2], ARGV[2], ARGV[3], ARGV[4]
local note, fence, call, place, claim, place_ttl
if ARGV[1] ~= '' then
  keys_read, values_read = 2, 4
  note, fence, call = optional_key('n'), optional_key('f'), optional_value('w')
  place, claim, place_ttl = optional_key('c'), optional_value('c'), optional_value('c')
end

local function store(mode)
  if lease == '' then
    return redis.call('SET', lock, token, mode)
  end
  return redis.call('SET', lock, token, mode, 'PX', lease)
end

if note and redis.call('EXISTS', note) == 1 then
  local holder = redis.call('GET', lock)
  -- It is mine where it was granted before the note was written, and that answer was lost.
  if is_owned_by(owner, holder) or call and is_owned_by(call, holder) then
    redis.call('DEL', lock)
    offer_next(lock, line, 1)
  end
  return 0
end
if note then  -- the lock may have had a limit until a deploy: then my attempt may run with another of its permits
  local names, values = permits(lock, line, 2, MAX_PERMITS)
  local copy = index_of_copy(token, values)
  if copy and is_running(values[copy]) then
    mark(names[copy], values[copy])
    local kept = redis.call('GET', lock)
    if call and is_owned_by(call, kept) or claim and is_owned_by(claim, kept) then
      redis.call('DEL', lock)
      offer_next(lock, line, 1)
    end
    return refused_to_copy(names[copy])
  end
end
local is_free = store('NX')
if is_free and not call and redis.call('EXISTS', line) == 1 then
  is_free = false
  offer_next(lock, line, 1)  -- instead of my token: who stands in line comes before who happens by
end

local function has_its_place()
  return claim and is_owned_by(claim, redis.call('GET', place))
end

-- A number greater than every fence before it, also where the key of the last fence has expired or was deleted: the
-- microseconds of the server's clock grow faster than any holders can follow each other.
local function next_fence(last)
  local number = string.format('%.0f', math.max(now(), (last or 0) + 1))
  redis.call('SET', fence, number, 'EX', 86400)
  return tonumber(number)
end

local function granted(again)
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
if is_mine or claim and is_owned_by(claim, holder) or call and is_owned_by(call, holder) then
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
if has_its_place() then
  redis.call('PEXPIRE', place, place_ttl)
end
if is_copy then
  mark(lock, holder)
end
return refused(line, {lock})
