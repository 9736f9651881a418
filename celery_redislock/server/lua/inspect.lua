-- Look at a lock.
--
-- KEYS[1]  the lock
--
-- Returns {holder's token, milliseconds left or -1}, or nil where it is free

local holder = redis.call('GET', KEYS[1])
return holder and {holder, redis.call('PTTL', KEYS[1])}
