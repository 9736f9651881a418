-- Mark a key of mine: a copy of my message is to come, so the release of the key must write a note for the copy.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of the rooms that wait for the lock
-- ARGV[1]  my owner: the first part of my token
-- ARGV[2]  how many may hold the lock at once
--
-- Returns 1: the key is marked
--         0: the key is not mine, or not any more

local number = 1
if ARGV[2] ~= '1' then
  number = permit_of(ARGV[1], KEYS[1], KEYS[2], tonumber(ARGV[2])) or 1
end
local permit = permit_name(KEYS[1], KEYS[2], number)
local holder = redis.call('GET', permit)
if not is_owned_by(ARGV[1], holder) then
  return 0
end
mark(permit, holder)
return 1
