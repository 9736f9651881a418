-- The prelude is part of every script: what all scripts know about the token that a lock's key holds.
--
-- A token minted by protocol/tokens.py is "<state><nonce> <attempt> <time> <host> <task>". Any other value was stored
-- by another library, or chosen by the caller of a `Lock`: it counts as running, and no script marks it. An owner is
-- the "<state><nonce>" of a minted token, or the whole of any other value.

-- The states of a key: held; held, and a copy of the holder's message was seen; reserved for a message; cooling down;
-- offered to the first room in line; kept for the waiter that this room has called.
local RUNS, SEEN, RESERVED, COOLING, OFFERED, CALLED = '>', '&', '~', '=', '?', '!'
local OWNER_LENGTH = 23
-- How long a key is offered to a room, how long it is kept for the waiter that the room calls, and how long the line is
-- kept after a room last entered it, in milliseconds.
local OFFER_MS, CALLED_MS, LINE_MS = 1000, 5000, 150000
-- For the states that a key enters without a change of owner: the previous state.
local SAME_OWNER = {[SEEN] = RUNS, [CALLED] = OFFERED}

-- Whether a key that holds `value` belongs to `owner`. If `owner` is a whole token, `value` must be that token. Either
-- way, the owner stays the same when a copy is seen, and when the room with the offer calls its waiter.
local function is_owned_by(owner, value)
  if not value or value == owner then
    return value == owner
  end
  if string.sub(value, 1, OWNER_LENGTH + 1) == owner .. ' ' then
    local state = string.sub(owner, 1, 1)
    return state == RUNS or state == RESERVED or state == COOLING or state == OFFERED
  end
  local nonce = string.match(value .. ' ', '^[&!]([%w_-]+) ')
  local state = SAME_OWNER[string.sub(value, 1, 1)]
  return nonce and #nonce == OWNER_LENGTH - 1 and is_owned_by(owner, state .. string.sub(value, 2))
end

-- The attempt in the token `value`; nil if the token is not a task's.
local function attempt_of(value)
  local attempt = string.match(value, '^[>&~=?!][%w_-]+ (%S+) ')
  return attempt ~= '*' and attempt or nil
end

-- Mark the key `lock`, which holds `value`: a copy of the holder's message was seen, so the release must write a note
-- for the copy.
local function mark(lock, value)
  if string.sub(value, 1, 1) == RUNS then
    redis.call('SETRANGE', lock, 0, SEEN)
  end
end

-- The limit of the waiters that the token `room` stands in line for. A room stands in line once for each limit.
local function limit_of(room)
  return tonumber(string.match(room, ' (%d+)$') or 1)
end

-- The channel on which a room hears hints. The last field of the room's token is "*" followed by the channel's prefix.
local function channel_of(room)
  local prefix = string.match(room, '^%S+ %S+ %S+ %S+ %*(%S*)') or ''
  prefix = string.gsub(prefix, '%%(%x%x)', function(hex) return string.char(tonumber(hex, 16)) end)
  return prefix .. 'redislock:room:' .. string.sub(room, 2, OWNER_LENGTH)
end

-- Send a hint about the key `lock` to a room. Returns how many processes hear it, or an error if the server's user may
-- not publish on the channel. The error does not end the script: without hints, rooms just notice later.
local function hint(room, what, lock)
  local message = what .. ' ' .. limit_of(room) .. ' ' .. lock
  return redis.pcall('PUBLISH', channel_of(room), message)
end

-- Each holder of a lock with a limit has a permit. Permit 1 is the lock's own key; the names of the others have
-- the same beginning as the line's.
local MAX_PERMITS = 50

local function permit_name(lock, line, number)
  return number == 1 and lock or string.sub(line, 1, -#':line' - 1) .. ':permit:' .. number
end

-- The names of the permits `first` to `last` of a lock, and their values: false for a free permit.
local function permits(lock, line, first, last)
  local names = {}
  for number = first, last do
    names[number - first + 1] = permit_name(lock, line, number)
  end
  return names, redis.call('MGET', unpack(names))
end

-- Whether `value` belongs to the minted `owner`. The plain search rules out most values cheaply.
local function belongs_to(owner, value)
  return string.find(value, string.sub(owner, 2, OWNER_LENGTH), 1, true) and is_owned_by(owner, value)
end

-- The number of the permit that belongs to `owner`; nil if none does. It may be above the limit: the limit may have
-- been lowered since the grant, and a release on behalf of a dead process does not know the limit.
local function permit_of(owner, lock, line, limit)
  for _, range in ipairs({{1, limit}, {limit + 1, MAX_PERMITS}}) do
    local first, last = range[1], range[2]
    local _, values = permits(lock, line, first, math.max(first, last))
    for i, value in ipairs(values) do
      if value and belongs_to(owner, value) then
        return first + i - 1
      end
    end
  end
end

local function is_running(value)
  local state = string.sub(value, 1, 1)
  return state == RUNS or state == SEEN
end

-- The index of the value with the same attempt as `token`, preferably one that is running; nil if there is none.
local function index_of_copy(token, values)
  local attempt, copy = attempt_of(token), nil
  for i, value in ipairs(values) do
    if attempt and value and attempt_of(value) == attempt and (not copy or is_running(value)) then
      copy = i
    end
  end
  return copy
end

-- The first room in line whose waiter may have the permit `number`; nil if there is none.
local function first_in_line(line, number)
  for _, room in ipairs(redis.call('ZRANGE', line, 0, number == 1 and 0 or -1)) do
    if number <= limit_of(room) then
      return room
    end
  end
end

-- Offer the free permit `number` of the lock to the first room in line. Scripts call this last.
--
-- That room leaves the line now, and may be dead. So the next live room gets a hint to check when the offer has ended:
-- a dead room delays the others by no more than one offer. (In a Cluster, PUBLISH may report no listeners; then the
-- first ten rooms get a hint.)
local function offer_next(lock, line, number)
  local room = first_in_line(line, number)
  if not room then
    return
  end
  redis.call('ZREM', line, room)
  redis.call('SET', permit_name(lock, line, number), room, 'PX', OFFER_MS)
  hint(room, 'offer', lock)
  for _, later in ipairs(redis.call('ZRANGE', line, 0, 9)) do
    local heard = hint(later, 'soon', lock)
    if type(heard) == 'table' or heard > 0 then
      break
    end
  end
end

-- Tell all rooms in line that the key `lock` now holds another token: a reservation, whose message may wait in one of
-- the rooms, or a token that expires sooner than the rooms expect. Scripts call this last.
local function hint_all(lock, line)
  for _, room in ipairs(redis.call('ZRANGE', line, 0, -1)) do
    hint(room, 'look', lock)
  end
end

-- The server's clock, in microseconds.
local function now()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- The reply if none of the permits `names` is available: {a holder's token, milliseconds until one of them is free
-- unless renewed, or -1, server's clock in microseconds}. With several holders, two more values: how many rooms stand
-- in line, and the tokens of the other holders.
local function refused(line, names)
  local holder, others, soonest = nil, {}, -1
  for i, value in ipairs(redis.call('MGET', unpack(names))) do
    if value then
      local left = redis.call('PTTL', names[i])
      if left >= 0 and (soonest < 0 or left < soonest) then
        soonest = left
      end
      if not holder then
        holder = value
      else
        table.insert(others, value)
      end
    end
  end
  if #others == 0 then
    return {holder, soonest, now()}
  end
  return {holder, soonest, now(), redis.call('ZCARD', line), others}
end

-- The reply to a copy whose attempt has the permit `name`. The copy must not get another permit, so it cannot wait.
local function refused_to_copy(name)
  return {redis.call('GET', name), redis.call('PTTL', name), now(), 0, {}, 1}
end

-- An option of a script is a letter in the flags, ARGV[1], with a key, values, or both. These follow the required
-- ones, in the order of the script's header. Before reading options, a script sets how many of each are required.
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
