-- Give the lock back, if it is mine: to nobody, and wake one who waits for it; or let it hold another token from now on.
-- And leave a note for copies of my message.
--
-- KEYS[1]  the lock
-- KEYS[2]  who waits for it
-- KEYS[3]  the list on which one of them blocks for a wake-up
-- ARGV[1]  flags: the letters of what is given besides, see below; and
--          u: a copy may wait unseen, so leave the note in any case
-- ARGV[2]  the owner that I am
-- n key    the note of my attempt; given only where the attempt has ended for good
-- n value  how long it lives, in milliseconds
-- g key    the note that the message to which the lock is left has been given up; given only where it is left to one
-- k value  the token that the lock holds from now on; given only where it is left to a message, or cools down
-- k value  for so many milliseconds
--
-- Returns 1: it was mine and is not any more
--         0: it was not mine (any more), and nothing was deleted

local flags = ARGV[1]
local note, note_ttl, gone, kept, kept_ttl
if flags ~= '' then
  keys_read, values_read = 3, 2
  note, note_ttl, gone = optional_key('n'), optional_value('n'), optional_key('g')
  kept, kept_ttl = optional_value('k'), optional_value('k')
end

local holder = redis.call('GET', KEYS[1])
local mine = is_owned_by(ARGV[2], holder)
if mine then
  redis.call('DEL', KEYS[1])  -- first: a full server refuses the rest unless something was deleted
  if kept and not (gone and redis.call('DEL', gone) == 1) then
    redis.call('SET', KEYS[1], kept, 'PX', kept_ttl)
  else
    wake_one(KEYS[2], KEYS[3])
  end
end
-- Where the lock was lost, a mark that a copy left on it is lost too.
if note and (not mine or string.find(flags, 'u', 1, true) or string.sub(holder, 1, 1) == SEEN) then
  redis.call('SET', note, '', 'PX', note_ttl)
end
return mine and 1 or 0
