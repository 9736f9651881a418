-- Release a key of mine: delete it or offer it to the first in line, or hand it over to a message, or let it cool down.
-- And write the note that my attempt is over, for copies of my message.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of the rooms that wait for the lock
-- ARGV[1]  flags: the letters of the options below that are given; and
--          u: a copy may wait unseen, so write the note even where no copy was seen
-- ARGV[2]  my owner: the first part of my token; or my whole token, where only a key that holds exactly that is meant
-- n key    the note of my attempt; given only where the attempt is over
-- n value  how long that note lives, in milliseconds
-- g key    the note that nobody comes with the next message's claim; given only where the key is handed over
-- k value  the token that the key is to hold next; given only where the key is handed over, or cools down
-- k value  how long the key holds that token, in milliseconds
-- s value  how many may hold the lock at once; given only where that is more than one. The key is then one of as many
--          permits: the one that is mine
--
-- Returns 1: the key was mine, and is not any more
--         0: the key was not mine, or not any more, and was not touched

-- The most frequent case, in which nobody waits and no copy was seen, comes before the prelude: to make the functions of
-- the prelude takes longer than this.
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
  redis.call('DEL', permit)  -- first: a server without memory refuses the writes below unless this has deleted
end
-- Where the key is not mine any more, the mark of a copy was lost with it: a copy may have been seen.
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
