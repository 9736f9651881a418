-- Give each lock its whole lease again, if it is still mine. An absolute lease: sent twice, it counts once.
--
-- KEYS[i]      the locks; in a Cluster all of one slot
-- ARGV[2i-1]   the owner that I am of lock i
-- ARGV[2i]     its lease in milliseconds
--
-- Returns a list: 1 renewed, 0 not mine any more

local renewed = {}
for i, key in ipairs(KEYS) do
  if is_owned_by(ARGV[2 * i - 1], redis.call('GET', key)) then
    renewed[i] = redis.call('PEXPIRE', key, ARGV[2 * i])
  else
    renewed[i] = 0
  end
end
return renewed
