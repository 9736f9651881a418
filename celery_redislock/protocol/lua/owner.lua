-- Whose a key is: the one test of ownership. Every script begins with this file, and has the prelude further down.
--
-- A token minted by protocol/tokens.py is "<state><nonce> <attempt> <time> <host> <task>". Any other value was stored
-- by another library, or chosen by the caller of a `Lock`: it counts as running, and no script marks it. An owner is
-- the "<state><nonce>" of a minted token, or the whole of any other value.

-- The states of a key: held; held, and a copy of the holder's message was seen; reserved for a message; cooling down;
-- offered to the first room in line; kept for the waiter that this room has called.
local RUNS, SEEN, RESERVED, COOLING, OFFERED, CALLED = '>', '&', '~', '=', '?', '!'
local OWNER_LENGTH = 23

-- Whether a key that holds `value` belongs to `owner`. If `owner` is a whole token, `value` must be that token. Either
-- way, the owner stays the same when a copy is seen, and when the room with the offer calls its waiter.
local function is_owned_by(owner, value)
  if not (owner and value and string.find(value, string.sub(owner, 2, OWNER_LENGTH), 1, true)) then
    return false  -- cheaply rules out most values
  end
  if value == owner then
    return true
  end
  if string.sub(value, 1, OWNER_LENGTH + 1) == owner .. ' ' then
    return string.find(owner, '^[>~=?]') ~= nil
  end
  local nonce = string.match(value .. ' ', '^[&!]([%w_-]+) ')
  if not nonce or #nonce ~= OWNER_LENGTH - 1 then
    return false
  end
  local before = string.sub(value, 1, 1) == SEEN and RUNS or OFFERED
  return is_owned_by(owner, before .. string.sub(value, 2))
end

local function state_of(value)
  return value and string.sub(value, 1, 1)
end
