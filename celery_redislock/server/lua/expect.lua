-- Mark a key of mine: a copy of my message is to come, so the release of the key must write a note for the copy.
--
-- KEYS[1]  the key of the lock
-- ARGV[1]  my owner: the first part of my token
--
-- Returns 1: the key is marked
--         0: the key is not mine, or not any more

local holder = redis.call('GET', KEYS[1])
if not is_owned_by(ARGV[1], holder) then
  return 0
end
mark(KEYS[1], holder)
return 1
