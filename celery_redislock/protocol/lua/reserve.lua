-- Reserve the key for a job that a publisher is about to send; or the place in the queue, if others have the key or
-- stand in line for it. Nothing is reserved if a job of the same task is outstanding (it has the key or the place), or
-- was published so recently that its window is still open.
--
-- KEYS[1]  the key of the lock
-- KEYS[2]  the line of rooms that wait for the lock
-- KEYS[3]  the place of the one message that may wait in the queue
-- ARGV[1]  the letters of the options that are given
-- ARGV[2]  the owner in the reservation's token: its first part
-- ARGV[3]  the token of the reservation
-- ARGV[4]  how long the key or the place is reserved, in milliseconds
-- ARGV[5]  the last field of that token: the task
-- ARGV[6]  ids of jobs whose end the publisher's caller may have seen, so their reservations are no longer needed. The
--          ids are spelled as in tokens, each with a space before and after it
-- ARGV[7]  ids of the jobs that the message must follow, and of others whose result cannot answer the call; same form
-- ARGV[8]  ids of jobs whose publishers have taken too long: what is reserved for them is taken unless they have been
--          sent; same form
-- Q value  anything: reserve only the place, even if the key is free
-- w key    the window of the caller's job; given only if the task has windows: it holds the last job's token
-- D value  how long that window stays open, in milliseconds; given with w
--
-- Returns granted: the key is reserved
--         queued: the place is reserved
--         {outstanding, token, milliseconds left or -1, token, milliseconds}: a job is outstanding, or another task's
--         job has the place; these are the holders of the key and of the place, nil for what is free
--         {window, token, milliseconds left}: the window of this job is open
--
-- If this is sent twice, the second command finds the token of the first. If the publisher dies after this, the
-- reservation expires after ARGV[4].

-- Fast path: everything is free. It precedes the prelude, whose definitions take longer than this.
if (ARGV[1] == '' or ARGV[1] == 'wD') and redis.call('EXISTS', unpack(KEYS, 2)) == 0 then
  if redis.call('SET', KEYS[1], ARGV[3], 'NX', 'PX', ARGV[4]) then
    if ARGV[1] == 'wD' then redis.call('SET', KEYS[4], ARGV[3], 'PX', ARGV[9]) end
    return 'granted'
  end
end

-- The prelude stands here.

local lock, line, place, owner, token, ttl = KEYS[1], KEYS[2], KEYS[3], ARGV[2], ARGV[3], ARGV[4]
local task, ended, preceding, unsent, given = ARGV[5], ARGV[6], ARGV[7], ARGV[8], options(3, 8)
local in_queue, window = given.Q, given.w and redis.call('GET', given.w)
local holder, queued = not in_queue and redis.call('GET', lock), redis.call('GET', place)

if is_owned_by(owner, holder) then return 'granted' end
if is_owned_by(owner, queued) then return 'queued' end

-- Whether `value` is the token of a job that may never be sent.
local function is_unsent(value)
  return state_of(value) == SENDING and is_among(unsent, value)
end

-- Whether `value` reserves the key or the place for a message that does not run.
local function is_over(value)
  return is_unsent(value) or is_reserved(value) and is_among(ended, value)
end

-- Whether `value` is the token of a job of this task whose result others can read: a message that has not started, or a
-- run in a worker. Only a worker's host has an "@".
local function is_outstanding(value)
  if not value or is_over(value) or is_among(ended, value) or is_among(preceding, value) then
    return false
  end
  local host, name = string.match(value, '^[>&~^=][%w_-]+ %S+ %d+ (%S+) (%S+)')
  return name == task and (is_reserved(value) or string.find(host, '@', 1, true) ~= nil)
end

local function outstanding()
  return {'outstanding', holder, holder and redis.call('PTTL', lock), queued, queued and redis.call('PTTL', place)}
end

local function take(name)
  redis.call('SET', name, token, 'PX', ttl)
  if given.w then redis.call('SET', given.w, token, 'PX', given.D) end
end

if window and not is_unsent(window) then
  return {'window', window, redis.call('PTTL', given.w)}
end
if is_outstanding(queued) or is_outstanding(holder) then
  return outstanding()
end
if is_over(queued) then
  redis.call('DEL', place)
  queued = false
end
local is_free = not holder or is_over(holder)
if is_free and not in_queue and redis.call('EXISTS', line) == 0 then
  take(lock)
  return 'granted'
end
if queued then
  return outstanding()
end
take(place)
if is_free and not in_queue then
  redis.call('DEL', lock)
  offer_next(lock, line, 1)  -- waiters go first
end
return 'queued'
