-- Leave the line of a lock: nobody in my room waits for it, or none who could begin now. Where the key is offered to me,
-- it is offered to the next room in line. Where I have called somebody to it, that one still comes, and may have it. "I"
-- am a room.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of the rooms that wait for the lock
-- ARGV[1]  the token of my room, whole, as for stand.lua
--
-- Returns 1: the key was offered to me, and is not any more
--         0: the key was not offered to me
--
-- Sent twice, the second finds nothing that is mine; but it offers a key that is free to the next room, as anybody may
-- at any time. If my process dies before this, my rank costs the time of one offer, or ends with the line.

local lock, line, room = KEYS[1], KEYS[2], ARGV[1]
local was_offered = 0
redis.call('ZREM', line, room)
local names, values = permits(lock, line, 1, limit_of(room))
for number, value in ipairs(values) do
  if value == room then
    redis.call('DEL', names[number])
    was_offered = 1
  end
  if not value or value == room then
    offer_next(lock, line, number)
  end
end
return was_offered
