-- Acquire a permit of a lock that several may hold at once: one that is mine already, is kept for me or reserved for my
-- message; else a free one, if nobody who stands in line may have it. "I" am the execution or the `Lock` that asks.
--
-- KEYS[1]  the key of the lock, which is its first permit
-- KEYS[2]  the line of the rooms that wait for the lock
-- ARGV[1]  flags: the letters of the options below that are given
-- ARGV[2]  my owner: the first part of my token, by which the scripts know me
-- ARGV[3]  my token
-- ARGV[4]  the lease in milliseconds; empty: the permit never expires
-- ARGV[5]  how many may hold the lock at once: the free permits above that number are not for me
-- n key    the note of my attempt; given only where my message may be a copy
-- w value  the token of the permit that is kept for me, whole; given only where I waited and was called
-- c key    the note that nobody comes with my message's claim; given only where my message carries one
-- c value  the owner in my message's reservation; it is made of the claim
-- c value  how long that note lives, in milliseconds
--
-- Returns the number of the permit: it was granted, and holds the token for the lease
--         0: my attempt has already ended in another execution
--         {holder's token, milliseconds until a permit is free unless it is renewed, or -1, microseconds of the
--         server's clock}, and more where there is more than one holder: no permit is free, or the free ones are kept
--         for who stands in line. Where my attempt runs with another permit, only that one is told of, and a last
--         value is 1
--
-- Sent twice: the second finds my token, and grants the same permit again. If I die after the grant, the lease ends it.
-- If the one whom a room has called dies before this, the permit that is kept for it ends by itself.

local lock, line, owner, token, lease, limit = KEYS[1], KEYS[2], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
keys_read, values_read = 2, 5
local note, call = optional_key('n'), optional_value('w')
local gone, claim, gone_ttl = optional_key('c'), optional_value('c'), optional_value('c')

-- Where the limit was greater until a moment ago, my attempt or my reservation may have a permit above it.
local names, values = permits(lock, line, 1, (note or claim) and MAX_PERMITS or limit)

-- The permits that are kept for me: I was called to one, and another may have been handed over to my message meanwhile.
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

-- Give back what is kept for me, except for the permit that I take.
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
  -- Who stands in line comes before who happens by. While an offer has no answer, its room is not in line, but more who
  -- wait may be in it.
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
  redis.call('GET', names[mine])  -- ends the script with an error: the key is no string, and none of a lock
end
if values[mine] and string.sub(values[mine], 1, 1) == SEEN then
  mark(names[mine], token)
end
if claim and not is_reserved and not was_mine then
  -- The run that publishes its next attempt hands its permit over only when it ends, and then finds this note.
  redis.call('SET', gone, '', 'PX', gone_ttl)
end
give_back_all_but(mine)
return mine
