-- Take a room out of the line of a lock: it has no waiter left for the lock, or none that could start now. If the key
-- is offered to the room, the next room gets the offer. A waiter that was already called may still take the key.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of rooms that wait for the lock
-- ARGV[1]  the room's whole token, as for stand.lua
--
-- Returns released: the key was offered to the room, and no longer is
--         left: the key was not offered to the room
--
-- If this is sent twice, the second command finds no offer to the room; it may offer a free key to the next room. If
-- the room's process dies before this, its entry delays the others by one offer, or expires with the line.

-- The prelude stands here.

local lock, line, room = KEYS[1], KEYS[2], ARGV[1]
local reply = 'left'
local is_rate = false
redis.call('ZREM', line, room)
local names, values = permits(lock, line, 1, capacity_of(room))
for number, value in ipairs(values) do
  is_rate = is_rate or state_of(value) == SPENT
  if value == room then
    redis.call('DEL', names[number])
    reply = 'released'
  end
  if not value or value == room then
    offer_next(lock, line, number)
  end
end
local first = is_rate and redis.call('ZRANGE', line, 0, 0)[1]
if first then hint(first, 'look', lock) end  -- it may be the first only now, and is to check when a permit is free
return reply
