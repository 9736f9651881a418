-- Acquire a permit of a lock with a limit for the caller: an execution or a `Lock`. It gets the permit that it already
-- has, or one reserved for its message or kept for it after a call; otherwise a free one that no waiter is entitled to.
--
-- KEYS[1]  the key of the lock, which is its first permit
-- KEYS[2]  the line of rooms that wait for the lock
-- ARGV[1]  flags: the letters of the options below that are given
-- ARGV[2]  the owner in the caller's token: its first part, which identifies the caller to the scripts
-- ARGV[3]  the caller's token
-- ARGV[4]  the lease in milliseconds; empty: the permit never expires
-- ARGV[5]  the limit: the caller gets no free permit with a higher number
-- n key    the note of the caller's attempt; given only if its message may be a copy
-- w value  the call: the whole token that keeps a permit for the caller; given only if it waited and was called
-- c key    the note saying that the claim is no longer needed; given only if the caller's message has a claim
-- c value  the owner in the message's reservation, made from the claim
-- c value  how long that note lives, in milliseconds
--
-- Returns the number of the permit: granted; it holds the token for the lease
--         0: the caller's attempt has already ended in another execution
--         {holder's token, milliseconds until a permit is free unless renewed, or -1, server's clock in microseconds},
--         and more if there are several holders: no permit is free, or the free ones are kept for waiters. If the
--         caller's attempt runs with another permit, only that holder is reported, followed by a last value of 1
--
-- If this is sent twice, the second command finds the caller's token and grants the same permit again. If the caller
-- dies after the grant, the permit ends with its lease. If a called waiter dies before this, the permit kept for it
-- expires.

local lock, line, owner, token, lease, limit = KEYS[1], KEYS[2], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
keys_read, values_read = 2, 5
local note, call = optional_key('n'), optional_value('w')
local gone, claim, gone_ttl = optional_key('c'), optional_value('c'), optional_value('c')

-- If the limit has just been lowered, the caller's attempt or its reservation may have a permit above it.
local names, values = permits(lock, line, 1, (note or claim) and MAX_PERMITS or limit)

-- The permits kept for the caller: the one it was called for, and perhaps one since handed over to its message.
local mine, kept, is_reserved = nil, {}, false

for number, value in ipairs(values) do
  if value and belongs_to(owner, value) then
    mine = number
  elseif value and call and belongs_to(call, value) then
    table.insert(kept, 1, number)
  elseif value and claim and belongs_to(claim, value) then
    table.insert(kept, number)
    is_reserved = true
  end
end

-- Give back what is kept for the caller, except for the permit `taken`.
local function give_back_all_but(taken)
  for _, number in ipairs(kept) do
    if number ~= taken then
      redis.call('DEL', names[number])
      offer_next(lock, line, number)
    end
  end
end

if note and redis.call('EXISTS', note) == 1 then
  table.insert(kept, mine)
  give_back_all_but(nil)
  return 0
end

local copy = not mine and index_of_copy(token, values)
if copy and (#kept == 0 or is_running(values[copy])) then
  mark(names[copy], values[copy])
  give_back_all_but(nil)
  return refused_to_copy(names[copy])
end

local was_mine = mine
mine = mine or kept[1]
local is_awaited = false
for number = 1, limit do
  is_awaited = is_awaited or values[number] and string.sub(values[number], 1, 1) == OFFERED
end
for number = 1, limit do
  -- Waiters go first. While an offer is unanswered, its room is out of the line, even if it has more waiters.
  if not mine and not values[number] and (call or not is_awaited and not first_in_line(line, number)) then
    mine = number
  end
end
if not mine then
  for number = 1, limit do
    if not values[number] then
      offer_next(lock, line, number)
    end
  end
  return refused(line, permits(lock, line, 1, limit))
end

local mode = values[mine] and 'XX' or 'NX'
local is_stored
if lease == '' then
  is_stored = redis.call('SET', names[mine], token, mode)
else
  is_stored = redis.call('SET', names[mine], token, mode, 'PX', lease)
end
if not is_stored then
  redis.call('GET', names[mine])  -- the key is not a string, so it is not a lock's: this fails and ends the script
end
if values[mine] and string.sub(values[mine], 1, 1) == SEEN then
  mark(names[mine], token)
end
if claim and not is_reserved and not was_mine then
  -- The run that published this message will hand its permit over when it ends, unless it finds this note.
  redis.call('SET', gone, '', 'PX', gone_ttl)
end
give_back_all_but(mine)
return mine
