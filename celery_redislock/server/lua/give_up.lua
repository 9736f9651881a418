-- Give back what was left to a message that will not run: the lock, and its place in the queue.
--
-- KEYS[1]  the lock
-- KEYS[2]  who waits for it
-- KEYS[3]  the list on which one of them blocks for a wake-up
-- KEYS[4]  the place of the one message that may wait in the queue
-- ARGV[1]  flags: the letters of what is given besides, see below
-- ARGV[2]  the owner to whom the lock, or the place, was left for the message
-- g key    the note that the message has been given up; given only where the lock may be left to it later
-- g value  how long it lives, in milliseconds
--
-- Returns 1: the lock was left to the message and is free
--         0: it was not

local owner = ARGV[2]
keys_read, values_read = 4, 2
local gone, gone_ttl = optional_key('g'), optional_value('g')

if is_owned_by(owner, redis.call('GET', KEYS[4])) then
  redis.call('DEL', KEYS[4])
end
if is_owned_by(owner, redis.call('GET', KEYS[1])) then
  redis.call('DEL', KEYS[1])
  wake_one(KEYS[2], KEYS[3])
  return 1
end
if gone then
  redis.call('SET', gone, '', 'PX', gone_ttl)
end
return 0
