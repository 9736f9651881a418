-- Give each lock its whole lease again, if it is still mine. An absolute lease: sent twice, it counts once.
--
-- KEYS[i]      the locks; in a Cluster all of one slot
-- ARGV[2i-1]   my nonce for lock i
-- ARGV[2i]     its lease in milliseconds
--
-- Returns a list: 1 renewed, 0 not mine any more

local renewed = {}
for i, key in ipairs(KEYS) do
  local nonce = ARGV[2 * i - 1]
  local holder = redis.call('GET', key)
  if holder and (holder == nonce or string.sub(holder, 1, #nonce + 1) == nonce .. ' ') then
    renewed[i] = redis.call('PEXPIRE', key, ARGV[2 * i])
  else
    renewed[i] = 0
  end
end
return renewed
