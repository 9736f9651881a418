-- Release the caller's permit: delete it, offer it to the first room in line, hand it over to a message, or let it cool
-- down. Also write the note that tells copies of the caller's message that the attempt is over. A message that will not
-- run releases its reservations like this.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of rooms that wait for the lock
-- ARGV[1]  the letters of the options that are given
-- ARGV[2]  the owner in the caller's token: its first part; or the whole token, if the key must hold exactly that
-- n key    the note of the caller's attempt; given only if the attempt is over
-- N value  how long that note lives, in milliseconds
-- U value  anything: a copy may be waiting unseen, so write the note even if no copy was seen
-- g key    the note saying that a claim is no longer needed: the caller's own, given with G, or that of K
-- G value  how long that note lives, in milliseconds; given only if the key may still be handed over to the caller
-- p key    the place of the one message that may wait in the queue; given only if it may be reserved for the caller. The
--          calls that were merged into that message are kept for it, because it may be delivered again
-- w key    the window of the caller's job; given, with p, only if the job never runs, so that the window closes, and the
--          calls that were merged into its message get no run
-- a key    the calls that are kept for the caller's attempt; given only if no copy or later attempt needs them, or needs to
--          know that the attempt was asked to stop
-- K value  the token that the permit holds next; given only to hand the permit over or let it cool down
-- T value  how long the permit holds that token, in milliseconds; empty: forever
-- S value  the capacity; given only if it is above 1: the caller may own any permit
--
-- Returns released: the caller owned the permit; now it is free, or offered to the first room in line
--         replaced: the caller owned the permit; now it holds the next token
--         lost: the caller did not own the permit, or no longer did; the permit was not touched

-- Fast path: no room waits and no copy was seen. It precedes the prelude, whose definitions take longer than this.
if (ARGV[1] == '' or ARGV[1] == 'nN') and redis.call('EXISTS', KEYS[2]) == 0 then
  local holder = redis.call('GET', KEYS[1])
  if holder and OWNS(ARGV[2], holder) then
    redis.call('DEL', KEYS[1])
    return 'released'
  end
end

-- The prelude stands here.

local lock, line, owner, given = KEYS[1], KEYS[2], ARGV[2], options(2, 2)
local number, permit, holder = permit_of(owner, lock, line, tonumber(given.S or 1))
local mine = is_owned_by(owner, holder)

for _, name in ipairs({given.p, given.w}) do
  if is_owned_by(owner, redis.call('GET', name)) then redis.call('DEL', name) end
end
local pending = named(line, ':pending')
if given.p and claim_of(pending) == nonce_of(owner) then
  if given.w or state_of(owner) == SENDING then
    redis.call('DEL', pending)
  else
    grant_calls(line, pending, redis.call('HGET', pending, 'job') or '')
  end
end
if given.a then
  redis.call('DEL', given.a)
  if mine and asked_by(holder) then redis.call('DEL', named(line, ':replaced:' .. id_of(holder))) end
end
if mine then
  redis.call('DEL', permit)  -- first: a server out of memory refuses the writes below unless something was deleted
end
-- If the caller has lost the permit, the mark of a copy was lost with it: a copy may have been seen.
if given.n and (not mine or given.U or state_of(holder) == SEEN) then
  redis.call('SET', given.n, '', 'PX', given.N)
end
if not mine then
  if given.G then
    redis.call('SET', given.g, '', 'PX', given.G)
  end
  return 'lost'
end
if given.K and not (given.g and redis.call('DEL', given.g) == 1) then
  store(permit, given.K, given.T, 'NX')
  -- The next token's message may wait in one of the rooms, and the token may expire sooner than the rooms expect.
  for _, room in ipairs(redis.call('ZRANGE', line, 0, -1)) do
    hint(room, 'look', lock)
  end
  return 'replaced'
end
offer_next(lock, line, number)
return 'released'
