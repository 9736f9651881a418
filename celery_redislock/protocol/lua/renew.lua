-- Renew each of some keys that is still mine: its lease begins anew. Sent twice, the script adds no second lease.
--
-- KEYS[i]      the keys of the locks; in a Cluster all of one hash slot
-- ARGV[2i-1]   my owner of key i: the first part of the token that the key should hold
-- ARGV[2i]     the lease of key i, in milliseconds
--
-- Returns a list with one number for each key: 1: renewed, 0: not mine any more; what is no string is not mine

-- The most frequent case, one key that is mine, comes before the prelude: to make the functions of the prelude takes
-- longer than this.
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
  local holder = redis.pcall('GET', key)  -- fails for what is no string, and must not keep the others from being renewed
  if type(holder) == 'string' and is_owned_by(ARGV[2 * i - 1], holder) then
    renewed[i] = redis.call('PEXPIRE', key, ARGV[2 * i])
  else
    renewed[i] = 0
  end
end
return renewed
