-- Mark the caller's permit: a copy of its message will arrive, so the release must write a note for the copy.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of rooms that wait for the lock
-- ARGV[1]  the owner in the caller's token: its first part
-- ARGV[2]  the capacity of the lock
--
-- Returns marked: the permit is marked
--         lost: the caller does not own the permit, or no longer does

-- The prelude stands here.

local _, permit, holder = permit_of(ARGV[1], KEYS[1], KEYS[2], tonumber(ARGV[2]))
if not is_owned_by(ARGV[1], holder) then return 'lost' end
mark(permit, holder)
return 'marked'
