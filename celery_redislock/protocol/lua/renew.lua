-- Renew the lease of each key that its owner still has. If this is sent twice, the lease is not added twice.
--
-- KEYS[i]      the keys of the locks; in a Cluster, all in one hash slot
-- ARGV[2i-1]   the owner in the token that key i should hold: its first part
-- ARGV[2i]     the lease of key i, in milliseconds
--
-- Returns one tag for each key: kept: renewed, lost: no longer the owner's, or not a string

local answers = {}
for i, key in ipairs(KEYS) do
  local holder = redis.pcall('GET', key)  -- fails if the key is not a string; the others must be renewed all the same
  answers[i] = 'lost'
  if type(holder) == 'string' and is_owned_by(ARGV[2 * i - 1], holder) then
    redis.call('PEXPIRE', key, ARGV[2 * i])
    answers[i] = 'kept'
  end
end
return answers
