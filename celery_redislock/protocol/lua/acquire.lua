-- Acquire a lock's key for the caller: an execution, a publish or a `Lock`. The key is granted if it is free and no
-- room stands in line; or if it is already the caller's, reserved for its message, or kept for it after a call.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of rooms that wait for the lock
-- ARGV[1]  flags: the letters of the options below that are given
-- ARGV[2]  the owner in the caller's token: its first part, which identifies the caller to the scripts
-- ARGV[3]  the token to store: the caller's own, or one that the caller of a `Lock` has chosen
-- ARGV[4]  the lease in milliseconds; empty: the key never expires
-- n key    the note of the caller's attempt; given only if its message may be a copy
-- f key    the last fence of the lock; given only to ask for a fence
-- w value  the call: the whole token that keeps the key for the caller; given only if it waited and was called
-- c key    the place of the one message that may wait in the queue; given only if the caller's message has a claim
-- c value  the owner in the message's reservation of the key or the place, made from the claim
-- c value  how long the place stays reserved if the key is not granted, in milliseconds
--
-- Returns 1: granted; the key holds the token for the lease
--         more than 1: granted, and this number is the fence
--         0: the caller's attempt has already ended in another execution
--         {holder's token, milliseconds left or -1, server's clock in microseconds}: held by, or kept for, another
--
-- If this is sent twice, the second command finds the caller's token and grants the key again. If the caller dies after
-- the grant, the lock ends with its lease. If a called waiter dies before this, the key that was kept for it expires.

-- Fast path: the key is free and no room waits. It precedes the prelude, whose definitions take longer than this.
if ARGV[1] == '' and ARGV[4] ~= '' and redis.call('EXISTS', KEYS[2]) == 0 then
  if redis.call('SET', KEYS[1], ARGV[3], 'NX', 'PX', ARGV[4]) then
    return 1
  end
end

-- Fast path for a job: the key is reserved for its message; or the place is, and the key is free.
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
  -- The caller has the key if it was granted before the note was written, and the reply to that grant was lost.
  if is_owned_by(owner, holder) or call and is_owned_by(call, holder) then
    redis.call('DEL', lock)
    offer_next(lock, line, 1)
  end
  return 0
end
if note then  -- the lock may have had a limit until the last deploy: the attempt may be running with another permit
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
  offer_next(lock, line, 1)  -- waiters go first: this replaces the token just stored
end

local function has_its_place()
  return claim and is_owned_by(claim, redis.call('GET', place))
end

-- A number greater than every earlier fence, even if the key with the last one has expired or was deleted: it is the
-- server's clock in microseconds, and no holder follows another within the same microsecond.
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
  -- An acquire without a reply is followed by a release of exactly its token. That release may arrive after this grant,
  -- so the key must not keep that old token, even if the caller is its owner.
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
