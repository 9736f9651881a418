-- Take the place in the queue for a message that a publisher is about to send, the ticket; or merge the publisher's call
-- into the ticket that has the place, so that nothing is sent. A ticket's calls are kept in ":pending" until its grant.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of rooms that wait for the lock
-- KEYS[3]  the place of the one message that may wait in the queue
-- ARGV[1]  the letters of the options that are given
-- ARGV[2]  the owner in the reservation's token: its first part
-- ARGV[3]  the token of the reservation
-- ARGV[4]  how long the place is reserved until the message is sent, in milliseconds
-- ARGV[5]  how long it is reserved after that, from when the ticket is due
-- ARGV[6]  the last field of that token: the task
-- ARGV[7]  ids of jobs whose end the publisher's caller may have seen; spelled as for reserve.lua
-- ARGV[8]  ids of jobs whose publishers have taken too long; same form
-- ARGV[9]  the call's body
-- A value  the call joins the ticket's calls, and this is the channel on which all rooms hear that a ticket is full;
--          otherwise the call replaces them
-- V value  in how many milliseconds the call is due
-- E value  in how many milliseconds the call expires
-- B value  the debounce in milliseconds: the ticket is due that long after its last call
-- X value  its maximum in milliseconds: the ticket is due at most that long after its first call
-- M value  the number that the call was given before
-- Z value  ids of the jobs that caused the call; spelled as for reserve.lua. Given only if the run that has the key is
--          asked to stop, unless it is of one of these jobs
-- R value  anything: the call is the next attempt of a run and keeps its number, given with M, and the run's earlier
--          calls. If another message has the place, the calls are kept under ":args:" for that attempt
--
-- Returns {queued, number, milliseconds until the ticket is due}: the place is reserved
--         {merged, number, ticket's token, milliseconds left}: the ticket's run has the call's arguments, or later ones
--         {merged, number}: the run with the call's arguments, or later ones, has begun. Given only with M
--         {outstanding, nil, nil, token, milliseconds left}: nothing can be merged into the message that has the place,
--         because it may never be sent, or has arguments of its own
--
-- If this is sent twice, the second command gets the reply of the first. If the publisher dies after this, the place
-- expires after ARGV[4], or is taken over.

-- The prelude stands here.

local lock, line, place, owner, token = KEYS[1], KEYS[2], KEYS[3], ARGV[2], ARGV[3]
local sending_ms, queued_ms, task, ended, unsent = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local body, given, time, attempt = ARGV[9], options(3, 9), now(), job_of(token)
local is_retry, bodies = given.R, {body}
local pending, answer = named(line, ':pending'), named(line, ':merged:' .. nonce_of(owner))
local queued, claim = redis.call('GET', place), claim_of(pending)
local job, last, first, due, count, expires, refused, stored = unpack(claim and
  redis.call('HMGET', pending, 'job', 'number', 'first', 'due', 'count', 'expires', 'refused', 'bodies') or {})
last, first, count = number_in(last), sound(first, time) or time, sound(count, MOST_CALLS + 1) or 0
due, expires = sound(due, 2 ^ 53) or 0, sound(expires, 2 ^ 53) or ''

if claim == nonce_of(owner) and is_owned_by(owner, queued) then
  return {'queued', last, ms_until(due)}
end
local number, asked, ticket = string.match(redis.call('GET', answer) or '', '^(%d+) (%d*) (.*)$')
if number and asked == (given.M or '') then
  return {'merged', tonumber(number), ticket, redis.call('PTTL', place)}
end
local newest, newest_id = newest_of(line)
-- If calls are collected, a newer one stands in for this one only if both were merged into the same job.
local is_certain = not given.A or string.find(ended, ' ' .. (newest_id or '') .. ' ', 1, true)
if given.M and not is_retry and newest >= tonumber(given.M) and is_certain then
  return {'merged', tonumber(given.M)}
end

if is_retry then
  local id, retries = string.match(attempt, '^(.*)/(%d+)$')
  bodies = bodies_of(named(line, ':args:' .. id .. '/' .. retries - 1))
  bodies[math.max(1, #bodies)] = body
end
local is_unsent = state_of(queued) == SENDING
local is_over = is_unsent and is_among(unsent, queued) or is_reserved(queued) and is_among(ended, queued)
local is_of_place = claim and claim == nonce_of(queued)
if queued and not is_over and (is_unsent or is_retry or not is_of_place or string.match(queued, '%S+$') ~= task) then
  if is_retry then
    keep_calls(named(line, ':args:' .. attempt), DAY_MS, 0, bodies, 'number', given.M)
  end
  return {'outstanding', false, false, queued, redis.call('PTTL', place)}
end

local joins = given.A ~= nil
local is_merged = queued and not is_over and not (joins and count >= MOST_CALLS)
if claim and (is_over and is_unsent and is_of_place or refused) then
  redis.call('DEL', pending)  -- these calls get no run: their job was refused, or never sent
elseif claim and not is_merged then
  -- These calls are the job's own from now on: the place expired, the ticket is full, or the job has ended; but it may
  -- have retried itself and then succeeded.
  grant_calls(line, pending, job or '')
end

number = is_retry and given.M or whole(math.max(time, last + 1, newest + 1))
if not is_merged then
  first, due, count, expires, stored = time, 0, 0, 0, 0
end
local due_at, ends = time + (given.V or 0) * 1000, given.E and whole(time + given.E * 1000) or ''
if given.B then
  due_at = math.max(due_at, math.min(time + given.B * 1000, first + (given.X or math.huge) * 1000))
end
local is_full = joins and count + #bodies >= MOST_CALLS
if joins then
  due_at = is_full and time or math.max(due_at, due)
end
-- The ticket expires with the last of its calls that does, and never if one of them does not.
ends = ends ~= '' and expires ~= '' and whole(math.max(ends, expires)) or ''
local lives = ms_until(due_at) + queued_ms
keep_calls(pending, lives + DAY_MS, joins and sound(stored, count + 1) or 0, bodies, 'number', number,
  'first', whole(first), 'due', whole(due_at > time and due_at or -time), 'count', count + #bodies, 'expires', ends)
if is_merged then
  -- If the ticket was lost, calls that are due at once must not keep its place forever.
  if due_at > time then outlast(place, lives) end
  if is_full then
    redis.pcall('PUBLISH', given.A, 'due 1 ' .. lock)  -- the ticket may sleep in a worker
  end
  if given.Z then ask_to_stop(lock, line, queued, number, given.Z) end
  redis.call('SET', answer, number .. ' ' .. (given.M or '') .. ' ' .. queued, 'PX', MINUTE_MS)
  return {'merged', tonumber(number), queued, redis.call('PTTL', place)}
end
redis.call('HSET', pending, 'claim', nonce_of(owner), 'job', attempt)
redis.call('SET', place, token, 'PX', sending_ms)
return {'queued', tonumber(number), ms_until(due_at)}
