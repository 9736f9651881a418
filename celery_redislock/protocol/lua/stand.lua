-- Stand in line for a lock's key, and take the key for the first waiter of my room where it is the turn of that waiter.
-- "I" am a room.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of the rooms that wait for the lock
-- ARGV[1]  the token of my room, whole, as the key holds it while it is offered to me; it ends with the limit that my
--          first waiter has, where that is more than one
-- ARGV[2]  the rank of my first waiter, an integer; and behind a "-" what tells that waiter from others of my room with
--          the same rank
-- ARGV[3]  the rank of my next waiter with the same limit; empty: my first waiter is the only one
--
-- Returns 1: my first waiter is called: the key is kept for a moment, until that waiter acquires it
--         {holder's token, milliseconds that remain or -1, microseconds of the server's clock}, and more where there is
--         more than one holder: the key is held by others, or kept for another; I stand in line
--
-- The token of a key that is called names the waiter that was called, as ARGV[2] does. So a command that is sent once more,
-- because its reply was lost, is answered as before; but a second look, for the next waiter, does not call that one
-- while the first is on its way. If my process dies while I stand, my rank costs the time of one offer, or ends with
-- the line. If it dies after it has called, or if the command arrives so late that nobody waits any more, the key is
-- kept for that time for nobody; then it is free, and who looks or asks next offers it to the first in line.
--
-- A lock with a limit has several permits: I take one, and all others that are free are offered to who stands in line.

local lock, line, room, rank = KEYS[1], KEYS[2], ARGV[1], string.match(ARGV[2], '^%d+')
local called = CALLED .. string.sub(room, 2) .. ' ' .. ARGV[2]
local names, values = permits(lock, line, 1, limit_of(room))

redis.call('ZADD', line, rank, room)
redis.call('PEXPIRE', line, LINE_MS)

-- Since the permit was offered to me, somebody may have come with a smaller rank, or mine with that rank has left.
local function is_for_a_smaller_rank(number)
  local rooms = redis.call('ZRANGE', line, 0, -1, 'WITHSCORES')
  for i = 1, #rooms, 2 do
    if tonumber(rooms[i + 1]) < tonumber(rank) and number <= limit_of(rooms[i]) then
      return true
    end
  end
  return false
end

local was_called, offered, another
for number, value in ipairs(values) do
  if value == called then
    was_called = number
  elseif value == room and is_for_a_smaller_rank(number) then
    redis.call('DEL', names[number])  -- and below it is offered to that one
    values[number] = false
  elseif value == room then
    offered, another = number, offered
  end
end
local mine = was_called or offered
-- Where the room is offered another permit, that is for its next waiter: as after an equal command before this one.
local next_rank = (another or was_called and offered) and '' or ARGV[3]

local function take_mine()
  redis.call('SET', names[mine], called, 'PX', CALLED_MS)
  if next_rank == '' then
    redis.call('ZREM', line, room)
  else
    redis.call('ZADD', line, next_rank, room)
  end
end

if mine then
  take_mine()
end
for number, value in ipairs(values) do
  if not value and not mine and first_in_line(line, number) == room then
    mine = number
    take_mine()
  elseif not value then
    offer_next(lock, line, number)
  end
end
return mine and 1 or refused(line, names)
