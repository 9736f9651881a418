-- Give up the reservations of a message that will not run, or does not need them: of the key, and of the place in the
-- queue.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of the rooms that wait for the lock
-- KEYS[3]  the place of the one message that may wait in the queue
-- ARGV[1]  flags: the letters of the options below that are given
-- ARGV[2]  the owner in the message's reservations; it is made of the claim that the message carries
-- g key    the note that nobody comes with this claim; given only where a run may hand the key over to it later
-- g value  how long that note lives, in milliseconds
-- s value  how many may hold the lock at once; given only where that is more than one
--
-- Returns 1: the key was reserved for the message, and is free now, or offered to the first in line
--         0: the key was not reserved for the message

local owner, number = ARGV[2], 1
keys_read, values_read = 3, 2
local gone, gone_ttl, limit = optional_key('g'), optional_value('g'), optional_value('s')
if limit then
  number = permit_of(owner, KEYS[1], KEYS[2], tonumber(limit)) or 1
end
local permit = permit_name(KEYS[1], KEYS[2], number)

if is_owned_by(owner, redis.call('GET', KEYS[3])) then
  redis.call('DEL', KEYS[3])
end
if is_owned_by(owner, redis.call('GET', permit)) then
  redis.call('DEL', permit)
  offer_next(KEYS[1], KEYS[2], number)
  return 1
end
if gone then
  redis.call('SET', gone, '', 'PX', gone_ttl)
end
return 0
