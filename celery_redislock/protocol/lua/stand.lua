-- Put a room in the line of a lock, and take the lock's key for the room's first waiter if it is that waiter's turn and
-- the waiter can start.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of rooms that wait for the lock
-- ARGV[1]  the room's whole token, as the key holds it while it is offered to the room. The token ends with the
--          capacity that the first waiter asked for, if that is above 1
-- ARGV[2]  the rank of the room's first waiter, an integer; then, after a "-", a number if other waiters of the room
--          have the same rank
-- ARGV[3]  the rank of the room's next waiter with the same capacity; empty if there is none; or "enter": the first
--          waiter cannot start yet
--
-- Returns {called, now}: the first waiter is called; the key is kept until it acquires it, for a few seconds at most
--         {called, now, milliseconds}: the same, if permits are spent; and when to check for the next waiter
--         {conflict, ...}, as `refused` in the prelude: the key is held by others, or kept for another; the room stands
--         in line
--         entered: the room stands in line. Nothing is offered, even if the key is free: this room could not use it,
--         and the others check for themselves
--
-- A call names the called waiter, as ARGV[2] does. So a command that is resent after a lost reply gets the same reply
-- again, but a command for the room's next waiter does not call that waiter while the first is on its way. If the
-- room's process dies in line, its entry delays the others by one offer, or expires with the line. If it dies after
-- calling a waiter, or the waiter is gone when the command arrives, the key is still kept for a few seconds. Then it is
-- free, and the next acquire, reserve, stand or leave offers it to the first room in line.
-- The room takes one permit. All other free permits are offered to the rooms in line.
-- A permit that is spent gets free without a command that could offer it. So the first room in line checks when the next
-- one does. Each later room checks a second later than the one before it, in case that one is dead.

-- The prelude stands here.

local lock, line, room, rank = KEYS[1], KEYS[2], ARGV[1], string.match(ARGV[2], '^%d+')
local called = CALLED .. string.sub(room, 2) .. ' ' .. ARGV[2]

redis.call('ZADD', line, rank, room)
redis.call('PEXPIRE', line, LINE_MS)
if ARGV[3] == 'enter' then return 'entered' end
local names, values = permits(lock, line, 1, capacity_of(room))

-- Since the offer, a waiter with a smaller rank may have joined the line, or the intended waiter may have left.
local function is_for_a_smaller_rank(number)
  local rooms = redis.call('ZRANGE', line, 0, -1, 'WITHSCORES')
  for i = 1, #rooms, 2 do
    if tonumber(rooms[i + 1]) < tonumber(rank) and number <= capacity_of(rooms[i]) then
      return true
    end
  end
end

local was_called, offered, another
for number, value in ipairs(values) do
  if value == called then
    was_called = number
  elseif value == room and is_for_a_smaller_rank(number) then
    redis.call('DEL', names[number])  -- offered below, to the smaller rank
    values[number] = false
  elseif value == room then
    offered, another = number, offered
  end
end
local mine = was_called or offered
-- A second permit offered to the room is for its next waiter, so the room leaves the line. If the first waiter was
-- called when this command was sent before, any offered permit is the second.
local next_rank = (another or was_called and offered) and '' or ARGV[3]

local function take_mine()
  store(names[mine], called, CALLED_MS, values[mine] and 'XX' or 'NX')
  if next_rank == '' then
    redis.call('ZREM', line, room)
  else
    redis.call('ZADD', line, next_rank, room)
  end
end

if mine then take_mine() end
for number, value in ipairs(values) do
  if not value and not mine and first_in_line(line, number) == room then
    mine = number
    take_mine()
  elseif not value then
    values[number] = offer_next(lock, line, number)
  end
end
local is_rate = false
for _, value in ipairs(values) do
  is_rate = is_rate or state_of(value) == SPENT
end
if mine and not is_rate then return {'called', now()} end
local rooms, later = is_rate and redis.call('ZRANGE', line, 0, -1) or {}, 0
for before, other in ipairs(rooms) do
  if other == room then later = OFFER_MS * (before - 1) end
end
if mine then values[mine] = called end
local reply = refused('conflict', 0, names, values, 1, #names, later)
if mine then
  if rooms[1] and rooms[1] ~= room then hint(rooms[1], 'in' .. reply[2] - later, lock) end
  return {'called', now(), reply[2]}
end
return reply
