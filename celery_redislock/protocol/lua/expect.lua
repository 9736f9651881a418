-- Mark the caller's key: a copy of its message will arrive, so the release must write a note for the copy.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of rooms that wait for the lock
-- ARGV[1]  the owner in the caller's token: its first part
-- ARGV[2]  the limit of the lock
--
-- Returns 1: the key is marked
--         0: the caller does not own the key, or no longer does

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
