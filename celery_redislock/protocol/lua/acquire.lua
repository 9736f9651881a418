-- Acquire a permit of a lock for the caller: an execution, a publish or a `Lock`. The caller gets the permit that it
-- already has, or one reserved for its message or kept for it after a call; otherwise a free one that no waiter is
-- entitled to.
--
-- KEYS[1]  the key of the lock, which is its first permit
-- KEYS[2]  the line of rooms that wait for the lock
-- ARGV[1]  the letters of the options that are given
-- ARGV[2]  the caller's token
-- ARGV[3]  the lease in milliseconds; empty: the permit never expires
-- n key    the note of the caller's attempt; given only if its message may be a copy
-- f key    the last fence of the lock; given only to ask for a fence
-- W value  the call: the whole token that keeps a permit for the caller; given only if it waited and was called
-- C value  the owner in the message's reservation, made from its claim; given only if it has one
-- p key    the place of the one message that may wait in the queue; given with C. With a capacity above 1, another
--          version of the task may have reserved it
-- P value  how long the place stays reserved if no permit is granted, in milliseconds
-- g key    the note saying that the claim is no longer needed; given with C, if the capacity is above 1
-- G value  how long that note lives, in milliseconds
-- S value  the capacity: the caller gets no free permit with a higher number; given only if it is above 1. With a rate,
--          the number of runs, which may exceed the number of permits; ARGV[3] is the rate's time
-- M value  the number that the call was given before; empty: no newer call replaces it. Given only if calls may have
--          been merged into the caller's message
-- L value  the body of the message's own arguments. They replace the last that the attempt before was given: the message
--          is its retry, but could not be merged. Given only with M
-- Z value  ids of the jobs that caused the call; spelled as for reserve.lua. Given, with M, only if newer calls replace
--          runs: unless it is empty, the run that has the key is asked to stop if it is of none of these jobs
-- F value  the digest of the caller's group; given only if the groups that wait for the lock take turns
-- H value  how long a turn of that group is, in microseconds of virtual time; given with F
-- Y value  the rank that the caller was given before; empty if it has none. Given with F
--
-- Returns granted: permit 1 holds the token for the lease
--         {granted, number, fence if asked for}: the permit with this number does
--         {granted, number, fence or nil, call's number, body ...}: the same, with M; the bodies are what the run is
--         given in place of its message's arguments
--         {due, milliseconds, server's clock in microseconds}: the run is to begin only then; given only with M
--         {superseded, task id}: a run with a newer call has begun; given only with M
--         {stopped, task id}: a run of the caller's job was asked to stop, for that task; given only with M
--         expired: the merged calls have expired; given only with M
--         finished: the caller's attempt has already ended in another execution
--         {conflict, ...}, as `refused` in the prelude: no permit is free, or the free ones are kept for waiters
--         {ranked, ...}: the same, with F, but in place of the number of rooms the rank with which the caller waits
--         {copy, ...}: the same, with one holder: the caller's attempt runs with that permit, and must not get another
--
-- If this is sent twice, the second command finds the caller's token and grants the same permit again. If the caller
-- dies after the grant, the permit ends with its lease; if it dies after a call, the permit kept for it expires.

-- Fast path: the key is free and no room waits. It precedes the prelude, whose definitions take longer than this.
if ARGV[1] == '' and ARGV[3] ~= '' and redis.call('EXISTS', KEYS[2]) == 0 then
  if redis.call('SET', KEYS[1], ARGV[2], 'NX', 'PX', ARGV[3]) then
    return 'granted'
  end
end

-- Fast path for a job: the key is reserved for its message; or the place is, and the key is free.
if ARGV[1] == 'CpP' and ARGV[3] ~= '' then
  local holder, place, claim = redis.call('GET', KEYS[1]), redis.call('GET', KEYS[3]), ARGV[4]
  local is_free = not holder and redis.call('EXISTS', KEYS[2]) == 0
  if (is_free or holder and OWNS(claim, holder)) and (not place or OWNS(claim, place)) then
    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
    if place then
      redis.call('DEL', KEYS[3])  -- from now on another message may wait
    end
    return 'granted'
  end
end

-- The prelude stands here.

local lock, line, token, lease = KEYS[1], KEYS[2], ARGV[2], ARGV[3]
local owner, given = string.gsub(string.sub(token, 1, OWNER_LENGTH), '^%' .. SENDING, RESERVED), options(2, 3)
local note, fence, call, claim, place, gone = given.n, given.f, given.W, given.C, given.p, given.g
local runs = tonumber(given.S or 1)
local capacity = math.min(runs, MAX_PERMITS)

-- The capacity may have just been lowered: then the caller's attempt, or its reservation, may have a permit above it.
local names, values = permits(lock, line, 1, (note or claim and capacity > 1) and MAX_PERMITS or capacity)

-- The permit that the caller has, and those kept for it: the one it was called for, and perhaps one since handed over
-- to its message.
local mine, kept, is_reserved, is_awaited = nil, {}, false, false
for number, value in ipairs(values) do
  if number > capacity and capacity == 1 then
    values[number] = is_running(value) and value  -- a lock with one holder ignores anything else
  elseif is_owned_by(owner, value) then
    mine = number
  elseif call and is_owned_by(call, value) then
    table.insert(kept, 1, number)
  elseif claim and is_owned_by(claim, value) then
    table.insert(kept, number)
    is_reserved = true
  elseif state_of(value) == OFFERED and number <= capacity then
    is_awaited = true  -- until its room answers, it is out of the line, even if it has more waiters
  end
end

-- Give back what is kept for the caller, except for the permit `taken`.
local function give_back_all_but(taken)
  for _, number in ipairs(kept) do
    if number ~= taken then
      redis.call('DEL', names[number])
      offer_next(lock, line, number)
    end
  end
end

local copy = not mine and index_of_copy(token, values)
if note and redis.call('EXISTS', note) == 1 or copy and state_of(values[copy]) == COOLING then
  table.insert(kept, mine)  -- it was granted before the note was written, and the reply to that grant was lost
  give_back_all_but(nil)
  return 'finished'
end
if copy and (#kept == 0 or is_running(values[copy])) then
  values[copy] = mark(names[copy], values[copy])
  give_back_all_but(nil)
  if copy > 1 or capacity > 1 then
    return refused('copy', 0, names, values, copy, copy)
  end
end

local job, number, is_replaceable = given.M and job_of(token), given.M, given.M ~= ''
local calls, own, before  -- hashes: what the run is given, and what its attempt and the one before were given

-- The hash with what the run is given: the calls that were merged into its message, or what was given to this attempt or
-- to the one before, whose process has died. nil if only the message has its arguments.
local function calls_of_run()
  local pending = named(line, ':pending')
  if claim and claim_of(pending) == nonce_of(claim) then return pending end
  return redis.call('EXISTS', own) == 1 and own or redis.call('EXISTS', before) == 1 and before or nil
end

-- The reply if the run must not begin now, or never; nil if it may begin.
local function refusal()
  local newest, id = newest_of(line)
  local lingers = is_running(values[1]) and id_of(values[1]) == id_of(token)  -- that run may yet store RETRY
  local by = given.Z and not lingers and replaced_by(line, token, number)
  if by then return {'stopped', by} end
  if calls then
    local due, expires = unpack(redis.call('HMGET', calls, 'due', 'expires'))
    if (tonumber(expires) or math.huge) <= now() then return {'expired'} end
    due = ms_until(sound(due, 2 ^ 53) or 0)
    if due > 0 then return {'due', due, now()} end
  end
  if is_replaceable and (tonumber(number) or 0) < newest then return {'superseded', id} end
end

if job then
  local id, retries = string.match(job, '^(.*)/(%d+)$')
  own, before = named(line, ':args:' .. job), named(line, ':args:' .. id .. '/' .. retries - 1)
  calls = calls_of_run()
  number = calls and redis.call('HGET', calls, 'number') or number
  local reply = not mine and refusal()
  if reply then
    local is_due_later = reply[1] == 'due'
    if place and is_owned_by(claim, redis.call('GET', place)) then
      if is_due_later then
        outlast(place, reply[2] + given.P)
      else
        redis.call('DEL', place)  -- at once: nothing may be merged into a message that does not run
      end
    end
    if calls and not is_due_later then
      redis.call('HSET', calls, 'refused', 1)
      redis.call('PEXPIRE', calls, MINUTE_MS)  -- the second command gets the same reply if this one is lost
    end
    give_back_all_but(nil)
    return reply
  end
end

-- Fair turns. A rank is a virtual time. The books are a sorted set: the virtual time, which is just after the latest
-- rank that was granted, so that who comes now goes after those with that rank; for each group the time of its next
-- turn; and the rank of each caller that waits, in case it asks again. New books begin by the clock, ahead of all ranks
-- that are times: virtual time passes more slowly.
local books, caller = given.F and named(line, ':fair'), attempt_of(token) or nonce_of(token)

-- Give the caller its rank, and move its group's next turn on. A rank that it has is kept unless the books that explain
-- it were lost.
local function rank_of_caller()
  local time, turn, rank = unpack(redis.call('ZMSCORE', books, 'now', given.F, caller))
  time = tonumber(time or FIRST_TURN + now())
  local newest = math.max(time, tonumber(turn or 0))
  rank = math.min(tonumber(rank or given.Y) or newest, newest)
  if rank == newest then
    redis.call('ZADD', books, whole(time), 'now', whole(rank + given.H), given.F, whole(rank), caller)
    redis.call('ZREMRANGEBYSCORE', books, '-inf', '(' .. whole(time - 1))
    redis.call('PEXPIRE', books, DAY_MS)
  end
  return rank
end

local granted = mine or kept[1]
for number = 1, capacity do
  -- Waiters go first.
  if not granted and not values[number] and (call or not is_awaited and not first_in_line(line, number)) then
    granted = number
  end
end
if not granted then
  -- If the key is not a string, it is not a lock's: this fails and ends the script.
  if not values[1] then redis.call('GET', lock) end
  for number = 1, capacity do
    values[number] = values[number] or offer_next(lock, line, number)
  end
  if place and is_owned_by(claim, redis.call('GET', place)) then
    redis.call('PEXPIRE', place, given.P)
  end
  if calls then outlast(calls, DAY_MS) end  -- the message may wait for days
  local since = given.Z and given.Z ~= '' and string.match(values[1] or '', '^%S+ %S+ (%d+) ')
  if since and since * 1000 <= (tonumber(number) or 0) then  -- the call is newer than the run that has the key
    ask_to_stop(lock, line, token, number, given.Z)
  end
  if books then return refused('ranked', rank_of_caller(), names, values, 1, capacity) end
  return refused('conflict', 0, names, values, 1, capacity)
end

if books and call then  -- a grant out of turn moves nothing: others with smaller ranks may wait
  local rank, turn = string.match(call, '(%d+)%-?%d*$'), redis.call('ZMSCORE', books, given.F)[1]
  if rank and turn and tonumber(rank) < tonumber(turn) then  -- else the books do not explain it
    redis.call('ZADD', books, 'GT', whole(rank + 1), 'now', turn, caller)  -- if it comes again, it takes another turn
  end
end

-- If a rate has more runs than there are permits, each permit is granted several times in the rate's time. Permits share
-- the runs so that a greater rate grants none of them less often: the permits of two rates allow no more than the greater.
local times = math.floor((runs - granted) / MAX_PERMITS) + 1
if times > 1 then lease = whole(math.ceil(lease / times)) end
-- An acquire without a reply is followed by a release of exactly its token. That release may arrive after this grant,
-- so the permit must not keep that old token, even if the caller is its owner.
store(names[granted], token, lease, values[granted] and 'XX' or 'NX')
if state_of(values[granted]) == SEEN then
  mark(names[granted], token)
end
local asking = mine and asked_by(values[mine])
if asking then redis.call('SETRANGE', lock, #token, ' <' .. asking) end
if place and is_owned_by(claim, redis.call('GET', place)) then
  redis.call('DEL', place)  -- from now on another message may wait
end
if gone and not is_reserved and not mine then
  -- The run that published this message will hand its permit over when it ends, unless it finds this note.
  redis.call('SET', gone, '', 'PX', given.G)
end
give_back_all_but(granted)
if call and state_of(token) == SPENT then
  -- The room that called the caller may still be the first in line, and did not know when this permit is free again.
  local first = redis.call('ZRANGE', line, 0, 0)[1]
  if first then hint(first, 'in' .. lease, lock) end
end
if not fence and not job then
  return {'granted', granted}
end

local last = false
if fence then
  -- A fence is greater than every earlier one, even if the key with the last one has expired or was deleted: it is the
  -- server's clock in microseconds, and no holder follows another within the same microsecond.
  last = sound(redis.call('GET', fence), 2 ^ 53 - 1)  -- greater numbers are not exact
  if not (mine and last) then
    last = math.max(now(), (last or 0) + 1)
    redis.call('SET', fence, whole(last), 'EX', 86400)
  end
end
if not job then
  return {'granted', granted, last}
end

local bodies = {}
if calls then
  if calls == before and given.L then
    redis.call('HSET', calls, redis.call('HGET', calls, 'bodies'), given.L)
  end
  bodies = bodies_of(calls)
  if calls ~= own then
    grant_calls(line, calls, job)  -- kept, because a copy of the message must be given the same
  end
  redis.call('HSET', own, 'due', '', 'expires', '')  -- that copy is always due, and does not expire
end
if given.Z and not mine then
  redis.call('DEL', named(line, ':replaced:' .. id_of(token)))  -- of an earlier publish under the same task id
end
redis.call('DEL', before)  -- that attempt has ended: this one has been given all that it was given
if number ~= '' then
  redis.call('SET', named(line, ':newest'), number .. ' ' .. string.match(job, '^[^/]+'), 'PX', DAY_MS)
end
return {'granted', granted, last, tonumber(number) or 0, unpack(bodies)}
