-- Report who has a lock, for how long, and how many rooms stand in line.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of rooms that wait for the lock
-- ARGV[1]  the capacity of the lock; if it is above 1, all permits are read
--
-- Returns {conflict, ...}, as `refused` in the prelude; or free
--
-- A rate is free until all its permits are spent.

-- The prelude stands here.

local names, values = permits(KEYS[1], KEYS[2], 1, ARGV[1] == '1' and 1 or MAX_PERMITS)
local is_rate, is_used_up = false, true
for number, value in ipairs(values) do
  is_rate = is_rate or state_of(value) == SPENT
  is_used_up = is_used_up and (value or number > tonumber(ARGV[1]))
end
if is_rate and not is_used_up then return 'free' end
local reply = refused('conflict', redis.call('ZCARD', KEYS[2]), names, values, 1, #names)
return reply[5] and reply or 'free'
