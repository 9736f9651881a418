-- Give the lock back, if it is mine: to nobody, and wake one who waits for it; or to whom it is left. And leave a note
-- for copies of my message.
--
-- KEYS[1]  the lock
-- KEYS[2]  who waits for it
-- KEYS[3]  the list on which one of them blocks for a wake-up
-- KEYS[4]  the note of my attempt; given only where the attempt has ended for good. Or that my message has been given up.
--          The lock again stands for what is not given but followed by another.
-- KEYS[5]  the note that the message to which the lock is left has been given up; given only with a token
-- ARGV[1]  my nonce
-- ARGV[2]  how long a note lives, in milliseconds
-- ARGV[3]  '1': a copy may wait unseen, so leave the note in any case
-- ARGV[4]  the token that the lock holds from now on; given only where it is left to a message, or cools down
-- ARGV[5]  for so many milliseconds
--
-- Returns 1: it was mine and is not any more
--         0: it was not mine (any more), and nothing was deleted

local holder = redis.call('GET', KEYS[1])
local mine = holder and (holder == ARGV[1] or string.sub(holder, 1, #ARGV[1] + 1) == ARGV[1] .. ' ')
local note = KEYS[4] ~= KEYS[1] and KEYS[4]
if mine then
  redis.call('DEL', KEYS[1])  -- first: a full server refuses the rest unless something was deleted
  if ARGV[4] and redis.call('DEL', KEYS[5]) == 0 then
    redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[5])
  elseif redis.call('EXISTS', KEYS[2]) == 1 then
    if redis.call('LLEN', KEYS[3]) == 0 then  -- one is enough, and those who wait may be dead
      redis.call('RPUSH', KEYS[3], '')
    end
    redis.call('PEXPIRE', KEYS[3], 1000)
  end
end
-- Where the lock was lost, a mark that a copy left on it is lost too.
if note and (not mine or ARGV[3] == '1' or string.sub(holder, -5) == ' copy') then
  redis.call('SET', note, '', 'PX', ARGV[2])
end
return mine and 1 or 0
