-- A ticket's message is sent: keep the place in the queue for it, and ask the run that has the key to stop.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of rooms that wait for the lock
-- KEYS[3]  the place of the one message that may wait in the queue
-- ARGV[1]  the owner in the token of the message's reservation: its first part
-- ARGV[2]  how long the place is reserved from now on, in milliseconds
-- ARGV[3]  ids of the jobs that caused the call, and whose runs are not asked; spelled as for reserve.lua
--
-- Returns kept: the place is reserved for the message
--         lost: it no longer is, because its run has begun or will not begin; nothing was asked
--
-- This may arrive late: by then another run may have the key, and even a newer call's. Only who still waits may ask.
-- If it is sent twice, the second command asks no run: one that stood in line before the message may have the key.

-- The prelude stands here.

local lock, line, place = KEYS[1], KEYS[2], KEYS[3]
local ticket = redis.call('GET', place)
if not is_owned_by(ARGV[1], ticket) then return 'lost' end
redis.call('PEXPIRE', place, ARGV[2])
if state_of(ticket) == SENDING then
  redis.call('SETRANGE', place, 0, RESERVED)
  local number = number_in(redis.call('HGET', named(line, ':pending'), 'number'))
  ask_to_stop(lock, line, ticket, whole(number), ARGV[3])
end
return 'kept'
