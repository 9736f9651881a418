-- Release the caller's key: delete it, offer it to the first room in line, hand it over to a message, or let it cool
-- down. Also write the note that tells copies of the caller's message that the attempt is over.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of rooms that wait for the lock
-- ARGV[1]  flags: the letters of the options below that are given; and
--          u: a copy may be waiting unseen, so write the note even if no copy was seen
-- ARGV[2]  the owner in the caller's token: its first part; or the whole token, if the key must hold exactly that
-- n key    the note of the caller's attempt; given only if the attempt is over
-- n value  how long that note lives, in milliseconds
-- g key    the note saying that the next message's claim is no longer needed; given only to hand the key over
-- k value  the token that the key will hold next; given only to hand the key over or let it cool down
-- k value  how long the key holds that token, in milliseconds
-- s value  the limit of the lock; given only if it is above 1. The key is then the permit that the caller owns
--
-- Returns 1: the caller owned the key, and no longer does
--         0: the caller did not own the key, or no longer did; the key was not touched

-- Fast path: no room waits and no copy was seen. It precedes the prelude, whose definitions take longer than this.
if (ARGV[1] == '' or ARGV[1] == 'n') and redis.call('EXISTS', KEYS[2]) == 0 then
  local holder = redis.call('GET', KEYS[1])
  if holder and string.sub(holder, 1, 1) == '>' and string.sub(holder, 1, 24) == ARGV[2] .. ' ' then
    redis.call('DEL', KEYS[1])
    return 1
  end
end

-- The prelude stands here.

local flags = ARGV[1]
local permit, number = KEYS[1], 1
local note, note_ttl, gone, next_token, next_ttl, limit
if flags ~= '' then
  keys_read, values_read = 2, 2
  note, note_ttl, gone = optional_key('n'), optional_value('n'), optional_key('g')
  next_token, next_ttl, limit = optional_value('k'), optional_value('k'), optional_value('s')
end
if limit then
  number = permit_of(ARGV[2], KEYS[1], KEYS[2], tonumber(limit)) or 1
  permit = permit_name(KEYS[1], KEYS[2], number)
end

local holder = redis.call('GET', permit)
local mine = is_owned_by(ARGV[2], holder)
if mine then
  redis.call('DEL', permit)  -- first: a server out of memory refuses the writes below unless something was deleted
end
-- If the caller has lost the key, the mark of a copy was lost with it: a copy may have been seen.
if note and (not mine or string.find(flags, 'u', 1, true) or string.sub(holder, 1, 1) == SEEN) then
  redis.call('SET', note, '', 'PX', note_ttl)
end
if not mine then
  return 0
end
if next_token and not (gone and redis.call('DEL', gone) == 1) then
  redis.call('SET', permit, next_token, 'PX', next_ttl)
  hint_all(KEYS[1], KEYS[2])
else
  offer_next(KEYS[1], KEYS[2], number)
end
return 1
