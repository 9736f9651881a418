-- Say of a lock of mine that a copy of its message is to come, so that its release leaves a note for it.
--
-- KEYS[1]  the lock
-- ARGV[1]  the owner that I am
--
-- Returns 1: said
--         0: it is not mine (any more)

local holder = redis.call('GET', KEYS[1])
if not is_owned_by(ARGV[1], holder) then
  return 0
end
mark(KEYS[1], holder)
return 1
