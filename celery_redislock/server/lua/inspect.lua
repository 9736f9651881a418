-- Tell what a lock's key holds, and for how long, and how many rooms stand in line for it.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of the rooms that wait for the lock
--
-- Returns {holder's token, milliseconds that remain or -1, microseconds of the server's clock, rooms in line}, or nil
-- where the key is free

local holder = redis.call('GET', KEYS[1])
return holder and {holder, redis.call('PTTL', KEYS[1]), now(), redis.call('ZCARD', KEYS[2])}
