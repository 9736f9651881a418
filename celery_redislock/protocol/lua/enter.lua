-- Enter the line of a lock: somebody waits in my room who cannot begin now. "I" am a room.
--
-- KEYS[1]  the line of the rooms that wait for the lock
-- ARGV[1]  the token of my room, whole, as for stand.lua
-- ARGV[2]  the rank of my first waiter, an integer
--
-- Returns 1
--
-- Nothing is offered here, also where the key is free: I could not have it, and any other room looks for itself. So
-- whoever comes to a free key while I stand first has me asked, and I leave the line if there is still no slot. Sent
-- twice, the second changes nothing. If my process dies, my rank costs the time of one offer, or ends with the line.

redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[1], LINE_MS)
return 1
