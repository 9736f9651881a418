-- Put a room in the line of a lock, for a waiter that cannot start yet.
--
-- KEYS[1]  the line of rooms that wait for the lock
-- ARGV[1]  the room's whole token, as for stand.lua
-- ARGV[2]  the rank of the room's first waiter, an integer
--
-- Returns {entered}
--
-- Nothing is offered here, even if the key is free: this room could not use it, and the others check for
-- themselves. If a newcomer finds the key free while this room is first, the key is offered to the room, which leaves
-- the line if it still has no slot. If this is sent twice, the second command changes nothing. If the room's process
-- dies, its entry delays the others by one offer, or expires with the line.

-- The prelude stands here.

redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[1], LINE_MS)
return {'entered'}
