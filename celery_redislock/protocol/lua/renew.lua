-- Renew the lease of each key that its owner still has. If this is sent twice, the lease is not added twice.
--
-- KEYS[i]      the keys of the locks; in a Cluster, all in one hash slot
-- ARGV[2i-1]   the owner in the token that key i should hold: its first part
-- ARGV[2i]     the lease of key i, in milliseconds
--
-- Returns one number for each key: 1: renewed, 0: no longer the owner's, or not a string

-- Fast path: one key, held by its owner. It precedes the prelude, whose definitions take longer than this.
if #KEYS == 1 then
  local key, owner, lease = unpack(KEYS), unpack(ARGV)
  local holder = redis.pcall('GET', key)
  local state = type(holder) == 'string' and string.sub(holder, 1, 1)
  if (state == '>' or state == '~') and string.sub(holder, 1, 24) == owner .. ' ' then
    return {redis.call('PEXPIRE', key, lease)}
  end
end

-- The prelude stands here.

local renewed = {}
for i, key in ipairs(KEYS) do
  local holder = redis.pcall('GET', key)  -- fails if the key is not a string; the others must be renewed all the same
  if type(holder) == 'string' and is_owned_by(ARGV[2 * i - 1], holder) then
    renewed[i] = redis.call('PEXPIRE', key, ARGV[2 * i])
  else
    renewed[i] = 0
  end
end
return renewed
