-- What every script knows of the value of a lock. It stands before each of them.
--
-- What tasks and locks of this package store is "<state><nonce> <attempt> <time> <host> <task>". Any other value is
-- another library's, or a caller's own: it counts as running, and nobody marks it. An owner is "<state><nonce>", or the
-- whole of such another value.

-- Runs; runs, and a copy of its message was seen; kept for a message; nobody's until its time is over.
local RUNS, SEEN, RESERVED, COOLING = '>', '&', '~', '='
local OWNER_LENGTH = 23

-- Whether the lock that holds `value` is `owner`'s; `owner` may be a whole token as well. That a copy was seen makes no
-- difference.
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

-- The attempt that `value` is of; nil outside tasks.
local function attempt_of(value)
  local attempt = string.match(value, '^[>&~=][%w_-]+ (%S+) ')
  return attempt ~= '*' and attempt or nil
end

-- Say of a run that a copy of its message was seen, so that its release leaves a note for the copy.
local function mark(lock, value)
  if string.sub(value, 1, 1) == RUNS then
    redis.call('SETRANGE', lock, 0, SEEN)
  end
end

-- Wake one of those who wait for a lock that was deleted.
local function wake_one(waiters, wake)
  if redis.call('EXISTS', waiters) == 1 then
    if redis.call('LLEN', wake) == 0 then  -- one is enough, and those who wait may be dead
      redis.call('RPUSH', wake, '')
    end
    redis.call('PEXPIRE', wake, 1000)
  end
end

-- What is optional is named by letters in the flags, ARGV[1], and follows the keys and values that are always given, in
-- the order of the script's header. Whoever reads it says first behind how many of these it begins.
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
