-- Report who has a lock, for how long, and how many rooms stand in line.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of rooms that wait for the lock
-- ARGV[1]  the capacity of the lock; if it is above 1, all permits are read
--
-- Returns {conflict, ...}, as `refused` in the prelude; or free

-- The prelude stands here.

local names, values = permits(KEYS[1], KEYS[2], 1, ARGV[1] == '1' and 1 or MAX_PERMITS)
local reply = refused('conflict', redis.call('ZCARD', KEYS[2]), names, values, 1, #names)
return reply[5] and reply or 'free'
