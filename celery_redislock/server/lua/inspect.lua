-- Tell what a lock's key holds, and for how long.
--
-- KEYS[1]  the key of the lock
--
-- Returns {holder's token, milliseconds that remain or -1}, or nil where the key is free

local holder = redis.call('GET', KEYS[1])
return holder and {holder, redis.call('PTTL', KEYS[1])}
