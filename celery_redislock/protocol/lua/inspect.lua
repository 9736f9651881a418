-- Tell what a lock's key holds, and for how long, and how many rooms stand in line for it.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of the rooms that wait for the lock
-- ARGV[1]  how many may hold the lock at once; where more than one may, all permits are looked at
--
-- Returns {holder's token, milliseconds that remain or -1, microseconds of the server's clock, rooms in line, tokens of
-- the other holders}, or nil where the key is free

local names, values = permits(KEYS[1], KEYS[2], 1, ARGV[1] == '1' and 1 or MAX_PERMITS)
for _, value in ipairs(values) do
  if value then
    local told = refused(KEYS[2], names)
    return {told[1], told[2], told[3], redis.call('ZCARD', KEYS[2]), told[5] or {}}
  end
end
