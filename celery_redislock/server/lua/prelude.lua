-- This text stands before every script: what all scripts know of the token that a lock's key holds.
--
-- A token that server/tokens.py has minted is "<state><nonce> <attempt> <time> <host> <task>". Any other value was
-- stored by another library, or chosen by the caller of a `Lock`: it counts as running, and no script marks it. An
-- owner is the "<state><nonce>" of a minted token, or the whole of another value.

-- The states of a key: a run or a `Lock` holds it; the same, and a copy of the holder's message was seen; it is reserved
-- for a message; it cools down, and nobody owns it.
local RUNS, SEEN, RESERVED, COOLING = '>', '&', '~', '='
local OWNER_LENGTH = 23

-- Whether a key that holds `value` belongs to `owner`. Where `owner` is a whole token, `value` must be that token.
-- In both cases it makes no difference whether `value` is marked because a copy was seen.
local function is_owned_by(owner, value)
  if not value or value == owner then
    return value == owner
  end
  if string.sub(value, 1, OWNER_LENGTH + 1) == owner .. ' ' then
    local state = string.sub(owner, 1, 1)
    return state == RUNS or state == RESERVED or state == COOLING
  end
  local nonce = string.match(value .. ' ', '^' .. SEEN .. '([%w_-]+) ')
  return nonce and #nonce == OWNER_LENGTH - 1 and is_owned_by(owner, RUNS .. string.sub(value, 2))
end

-- The attempt in the token `value`; nil where the token is not a task's.
local function attempt_of(value)
  local attempt = string.match(value, '^[>&~=][%w_-]+ (%S+) ')
  return attempt ~= '*' and attempt or nil
end

-- Mark the key `lock`, which holds `value`: a copy of the holder's message was seen, so the release of the key must
-- write a note for the copy.
local function mark(lock, value)
  if string.sub(value, 1, 1) == RUNS then
    redis.call('SETRANGE', lock, 0, SEEN)
  end
end

-- Wake one waiter of a lock whose key was deleted.
local function wake_one(waiters, wake)
  if redis.call('EXISTS', waiters) == 1 then
    if redis.call('LLEN', wake) == 0 then  -- one wake-up is enough: the waiters may be dead
      redis.call('RPUSH', wake, '')
    end
    redis.call('PEXPIRE', wake, 1000)
  end
end

-- An option of a script is a letter in the flags, ARGV[1], with a key, values, or both. Those of the given options
-- follow the keys and values that are always given, in the order of the script's header. A script that reads
-- options first sets how many keys and how many values are always given.
local keys_read, values_read

local function optional_key(letter)
  if string.find(ARGV[1], letter, 1, true) then
    keys_read = keys_read + 1
    return KEYS[keys_read]
  end
end

local function optional_value(letter)
  if string.find(ARGV[1], letter, 1, true) then
    values_read = values_read + 1
    return ARGV[values_read]
  end
end
