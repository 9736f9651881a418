-- Stand in line for a lock's key, and take the key for the first waiter of my room where it is the turn of that waiter.
-- "I" am a room.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of the rooms that wait for the lock
-- ARGV[1]  the token of my room, whole, as the key holds it while it is offered to me; it ends with the limit that my
--          first waiter has, where that is more than one
-- ARGV[2]  the place of my first waiter, an integer
-- ARGV[3]  the place of my next waiter with the same limit; empty: my first waiter is the only one
--
-- Returns 1: my first waiter is called: the key is kept for a moment, until that waiter acquires it
--         {holder's token, milliseconds that remain or -1, microseconds of the server's clock}, and more where there is
--         more than one holder: the key is held by others, or kept for another; I stand in line
--
-- The token of a key that is called names the place for which it was called. So a command that is sent once more,
-- because its reply was lost, is answered as before; but a second look, for the next waiter, does not call that one
-- while the first is on its way. If my process dies while I stand, my place costs the time of one offer, or ends with
-- the line. If it dies after it has called, or if the command arrives so late that nobody waits any more, the key is
-- kept for that time for nobody; then it is free, and who looks or asks next offers it to the first in line.
--
-- A lock with a limit has several slots: I take one, and all others that are free are offered to who stands in line.

local lock, line, room, place = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local called = CALLED .. string.sub(room, 2) .. ' ' .. place
local names, values = slots(lock, line, 1, limit_of(room))

redis.call('ZADD', line, place, room)
redis.call('PEXPIRE', line, LINE_MS)
local mine
for number, value in ipairs(values) do
  if value == called then
    mine = number
    break
  elseif value == room or not value and not mine and first_in_line(line, number) == room then
    mine = number
  end
end
if mine then
  redis.call('SET', names[mine], called, 'PX', CALLED_MS)
  if ARGV[3] == '' then
    redis.call('ZREM', line, room)
  else
    redis.call('ZADD', line, ARGV[3], room)
  end
end
for number, value in ipairs(values) do
  if not value and number ~= mine then
    offer_next(lock, line, number)
  end
end
return mine and 1 or refused(line, names)
