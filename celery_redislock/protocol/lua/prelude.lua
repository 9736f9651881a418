-- The prelude: what the scripts know about the token that a lock's key holds, and about permits, rooms and options.
--
-- A token minted by protocol/tokens.py is "<state><nonce> <attempt> <time> <host> <task>". Any other value was stored
-- by another library, or chosen by the caller of a `Lock`: it counts as running, and no script marks it. An owner is
-- the "<state><nonce>" of a minted token, or the whole of any other value.

-- The states of a key: held; held, and a copy of the holder's message was seen; reserved for a message; reserved for one
-- that its publisher has not sent yet; cooling down; spent: granted by a rate, and free when its time is over; offered
-- to the first room in line; kept for the waiter that this room has called.
local RUNS, SEEN, RESERVED, SENDING, COOLING, SPENT, OFFERED, CALLED = '>', '&', '~', '^', '=', '#', '?', '!'
local SAME_OWNER = {[SEEN] = RUNS, [SENDING] = RESERVED, [CALLED] = OFFERED}
local OWNER_LENGTH = 23

-- Whether a key that holds `value` belongs to `owner`. If `owner` is a whole token, `value` must be that token. Either
-- way, the owner stays the same when a copy is seen, when the holder is asked to stop, when the message is sent, and when
-- the room with the offer calls its waiter.
local function is_owned_by(owner, value)
  if not value or not string.find(value, string.sub(owner, 2, OWNER_LENGTH), 1, true) then
    return false  -- cheaply rules out most values
  end
  if value == owner or OWNS(owner, value) then return true end
  local whole = string.match(value, '^([>&][%w_-]+ .*) <%S+$')
  if whole then return is_owned_by(owner, whole) end  -- the holder was asked to stop
  local state, nonce = string.match(value .. ' ', '^([&^!])([%w_-]+) ')
  if not nonce or #nonce ~= OWNER_LENGTH - 1 then
    return false
  end
  return is_owned_by(owner, SAME_OWNER[state] .. string.sub(value, 2))
end

local function state_of(value)
  return value and string.sub(value, 1, 1)
end

-- How long a key is offered to a room, how long it is kept for the waiter that the room calls, and how long the line is
-- kept after a room last entered it, in milliseconds.
local OFFER_MS, CALLED_MS, LINE_MS = 1000, 5000, 150000

-- How long what a ticket's run was given is kept for its copies, and the answer to a merged call for its publisher and
-- what belongs to a run that is refused, in milliseconds; and with how many calls a ticket that collects them is full.
local DAY_MS, MINUTE_MS, MOST_CALLS = 86400000, 60000, 100

-- The options of a command, by their letters in ARGV[1]. A small letter has a key and a capital letter has a value.
-- They follow the `keys` and `values` that are required, in the order of the letters.
local function options(keys, values)
  local given = {}
  for letter in string.gmatch(ARGV[1], '.') do
    local is_key = letter == string.lower(letter)
    keys, values = keys + (is_key and 1 or 0), values + (is_key and 0 or 1)
    given[letter] = is_key and KEYS[keys] or ARGV[values]
  end
  return given
end

-- The attempt in the token `value`; nil if the token is not a task's, or is spent: no message is a copy of that.
local function attempt_of(value)
  local attempt = string.match(value, '^[>&~^=?!][%w_-]+ (%S+) ')
  return attempt ~= '*' and attempt or nil
end

-- The nonce in the token or the owner `value`.
local function nonce_of(value)
  return value and string.sub(value, 2, OWNER_LENGTH)
end

-- Whether the key or the place that holds `value` is reserved for a message, sent or not.
local function is_reserved(value)
  return state_of(value) == RESERVED or state_of(value) == SENDING
end

-- The id of the job in the token `value`; nil if the token is not a task's.
local function id_of(value)
  return string.match(attempt_of(value) or '', '^[^/]+')
end

-- Whether `ids` names the job with the token `value`. Each id has a space before and after it.
local function is_among(ids, value)
  local id = id_of(value)
  return id and string.find(ids, ' ' .. id .. ' ', 1, true) ~= nil
end

-- The id of the job that asks the holder with the token `value` to stop; nil if none does.
local function asked_by(value)
  return string.match(value, ' <(%S+)$')
end

-- Mark the key `name`, which holds `value`: a copy of the holder's message was seen, so the release must write a note
-- for the copy. Returns what the key holds now.
local function mark(name, value)
  if state_of(value) ~= RUNS then return value end
  redis.call('SETRANGE', name, 0, SEEN)
  return SEEN .. string.sub(value, 2)
end

-- Have the key `name` hold `token` for `ttl` milliseconds; forever if `ttl` is empty. `mode` is NX or XX, as for SET.
-- To MGET, a key that is not a string looks free. It is not a lock's: this fails and ends the script.
local function store(name, token, ttl, mode)
  local expiry = ttl == '' and {} or {'PX', ttl}
  if not redis.call('SET', name, token, mode, unpack(expiry)) then redis.call('GET', name) end
end

-- The ranks from this one on are virtual times, which are given out by acquire.lua. All others are times of the clock.
local FIRST_TURN = 2 ^ 52

-- The server's clock, in microseconds.
local function now()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- A number as text: Lua's own has 14 digits.
local function whole(number)
  return string.format('%.0f', number)
end

-- Milliseconds until `moment`, by the server's clock in microseconds; 0 if it has passed.
local function ms_until(moment)
  return math.max(0, math.ceil((moment - now()) / 1000))
end

-- The capacity that the waiters with the token `room` asked for. A room stands in line once for each capacity.
local function capacity_of(room)
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
  return redis.pcall('PUBLISH', channel_of(room), what .. ' ' .. capacity_of(room) .. ' ' .. lock)
end

-- The name of another key of the lock with this line.
local function named(line, kind)
  return string.sub(line, 1, -#':line' - 1) .. kind
end

-- Each holder of a lock has a permit. Permit 1 is the lock's own key; the names of the others begin as the line's does.
local MAX_PERMITS = 50

local function permit_name(lock, line, number)
  return number == 1 and lock or named(line, ':permit:' .. number)
end

-- The names of the permits `first` to `last` of a lock, and their values: false for a free permit.
local function permits(lock, line, first, last)
  local names = {}
  for number = first, last do
    names[number - first + 1] = permit_name(lock, line, number)
  end
  return names, redis.call('MGET', unpack(names))
end

-- The number of the permit that belongs to `owner`, or 1; its name and its value. It may be above the capacity, which
-- may have been lowered since the grant; and a release on behalf of a dead process does not know the capacity.
local function permit_of(owner, lock, line, capacity)
  local first, last = 1, capacity
  while capacity > 1 and first <= MAX_PERMITS do
    local names, values = permits(lock, line, first, last)
    for i, value in ipairs(values) do
      if is_owned_by(owner, value) then
        return first + i - 1, names[i], value
      end
    end
    first, last = last + 1, MAX_PERMITS
  end
  return 1, lock, redis.call('GET', lock)
end

local function is_running(value)
  return state_of(value) == RUNS or state_of(value) == SEEN
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
    if number <= capacity_of(room) then
      return room
    end
  end
end

-- Offer the free permit `number` of the lock to the first room in line. Return what the permit holds now; false if no
-- room can have it. Scripts call this last.
--
-- That room leaves the line now, and may be dead. So the next live room gets a hint to check when the offer has ended:
-- a dead room delays the others by no more than one offer. (In a Cluster, PUBLISH may report no listeners; then the
-- first ten rooms get a hint.)
local function offer_next(lock, line, number)
  local room = first_in_line(line, number)
  if not room then return false end
  store(permit_name(lock, line, number), room, OFFER_MS, 'NX')
  redis.call('ZREM', line, room)
  hint(room, 'offer', lock)
  for _, later in ipairs(redis.call('ZRANGE', line, 0, 9)) do
    local heard = hint(later, 'soon', lock)
    if type(heard) == 'table' or heard > 0 then
      break
    end
  end
  return room
end

-- The reply that says who has the permits `first` to `last`: {tag, milliseconds until one of them is free unless
-- renewed, or -1, server's clock in microseconds, rooms in line, a holder's token, those of other holders ...}. Of the
-- permits that are spent, it names the one that is free first. The caller is to check `later` milliseconds after that.
local function refused(tag, rooms, names, values, first, last, later)
  local tokens, soonest, spent = {}, -1, nil
  for number = first, last do
    if values[number] then
      local left = redis.call('PTTL', names[number])
      local is_next = soonest < 0 or left >= 0 and left < soonest
      soonest = is_next and left or soonest
      if state_of(values[number]) ~= SPENT then
        table.insert(tokens, values[number])
      elseif is_next or not spent then
        spent = values[number]
      end
    end
  end
  if spent then table.insert(tokens, spent) end
  return {tag, soonest + (soonest >= 0 and later or 0), now(), rooms, unpack(tokens)}
end

-- A ticket is a message that stands for several calls. A hash keeps the number of the last call, how many `bodies`
-- there are, and each body under its number. Until the ticket is granted its key, the hash is ":pending" and also has
-- the ticket's `claim` and `job`, when the `first` call came, when the ticket is `due` (negative: at once) and
-- `expires`, by the server's clock in microseconds, the `count` of calls, and whether its run was `refused` for good.
-- From then on it is ":args:<job>"; sooner if the job loses its place in the queue, or may take no more calls.

-- The attempt in the token `value` as ":args:" names it: "<task id>/<retries>".
local function job_of(value)
  return string.match(attempt_of(value) or '', '^[^/]+/%d+')
end

-- The nonce in the token of the ticket that the calls in `pending` wait for; nil if none wait.
local function claim_of(pending)
  local claim = redis.pcall('HGET', pending, 'claim')
  return type(claim) == 'string' and claim or nil
end

-- The number in the field `text` if it is at least 0 and below `limit`; nil if not: the field is missing or damaged.
local function sound(text, limit)
  local number = tonumber(text or '')
  return number and number >= 0 and number < limit and number or nil
end

-- The number of a call in the field `text`; 0 if there is none. Such numbers follow the server's clock: one that is more
-- than a day ahead of it was forged.
local function number_in(text)
  return sound(text, now() + DAY_MS * 1000) or 0
end

-- The number and the task id of the newest call with which a run has begun; 0 if it is not known.
local function newest_of(line)
  local number, id = string.match(redis.call('GET', named(line, ':newest')) or '', '^(%d+) (.*)$')
  return number_in(number), id
end

-- The id of the job for which a run of this job was asked to stop, if the caller with the token `token` is that run's
-- message again, or its retry: an older call than the one that asked, `number`. nil if not. Another publish under the
-- same task id is neither.
local function replaced_by(line, token, number)
  local value = redis.call('GET', named(line, ':replaced:' .. id_of(token)))
  local newer, by, asked = string.match(value or '', '^(%d+) (%S+) (%S+)$')
  if not asked or number_in(newer) <= (tonumber(number) or 0) then return nil end
  local before, after = string.match(asked, '^[^/]+/(%d+/%d+)'), string.match(attempt_of(token), '^[^/]+/(%d+/%d+)')
  return (attempt_of(token) == asked or before ~= after and after ~= '0/0') and by or nil
end

-- Ask the run that has the key `lock` to stop, for a job whose message is sent: the one with the token `ticket`, whose last
-- call is `number`. Only a worker's run of the same task is asked, and no run of that job or of the jobs in `causes`. The
-- token says which job asks. A redelivery or a retry of that run will not begin.
local function ask_to_stop(lock, line, ticket, number, causes)
  local holder = redis.call('GET', lock) or ''
  local host, task = string.match(holder, '^[>&]%S+ %S+ %d+ (%S+) (%S+)$')
  local is_run = host and string.find(host, '@', 1, true) and string.match(ticket, '^%S+ %S+ %d+ %S+ (%S+)') == task
  local id, by = id_of(holder), id_of(ticket)
  if is_run and id ~= by and not is_among(causes, holder) then
    redis.call('SETRANGE', lock, #holder, ' <' .. by)
    redis.call('SET', named(line, ':replaced:' .. id), number .. ' ' .. by .. ' ' .. attempt_of(holder), 'PX', DAY_MS)
  end
end

-- Have the key `name` live for `ttl` milliseconds at least.
local function outlast(name, ttl)
  if redis.call('PTTL', name) < tonumber(ttl) then redis.call('PEXPIRE', name, ttl) end
end

-- Write `bodies` and other fields to the hash `name`, after the `before` bodies that it has.
local function keep_calls(name, ttl, before, bodies, ...)
  local fields = {'bodies', before + #bodies, ...}
  for number, body in ipairs(bodies) do
    table.insert(fields, before + number)
    table.insert(fields, body)
  end
  redis.call('HSET', name, unpack(fields))
  outlast(name, ttl)
end

-- The bodies in the hash `name`; none if there is no such hash, or if it is damaged.
local function bodies_of(name)
  local numbers = {}
  for number = 1, sound(redis.call('HGET', name, 'bodies'), MOST_CALLS + 1) or 0 do
    numbers[number] = number
  end
  return #numbers > 0 and redis.call('HMGET', name, unpack(numbers)) or {}
end

-- Keep the calls in `hash` as what `job` is given.
local function grant_calls(line, hash, job)
  redis.call('RENAME', hash, named(line, ':args:' .. job))
  outlast(named(line, ':args:' .. job), DAY_MS)
end
