-- Give up the reservations of a message that will not run, or does not need them: the key, and the place in the queue.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of rooms that wait for the lock
-- KEYS[3]  the place of the one message that may wait in the queue
-- ARGV[1]  flags: the letters of the options below that are given
-- ARGV[2]  the owner in the message's reservations, made from its claim
-- g key    the note saying that the claim is no longer needed; given only if a run may still hand over the key
-- g value  how long that note lives, in milliseconds
-- s value  the limit of the lock; given only if it is above 1
--
-- Returns 1: the key was reserved for the message; now it is free, or offered to the first room in line
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
