-- Report what a lock's key holds, for how long, and how many rooms stand in line.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of rooms that wait for the lock
-- ARGV[1]  the limit of the lock; if it is above 1, all permits are read
--
-- Returns {holder's token, milliseconds left or -1, server's clock in microseconds, rooms in line, tokens of the other
-- holders}, or nil if the key is free

local names, values = permits(KEYS[1], KEYS[2], 1, ARGV[1] == '1' and 1 or MAX_PERMITS)
for _, value in ipairs(values) do
  if value then
    local told = refused(KEYS[2], names)
    return {told[1], told[2], told[3], redis.call('ZCARD', KEYS[2]), told[5] or {}}
  end
end
