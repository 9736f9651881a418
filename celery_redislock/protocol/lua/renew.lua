-- Renew the lease of each key that its owner still has. If this is sent twice, the lease is not added twice. A publisher
-- sends this once its message is sent, naming the job's window too. A chosen token, its own owner, stays as it is.
--
-- KEYS[i]      the keys of the locks; in a Cluster, all in one hash slot
-- ARGV[2i-1]   the owner in the token that key i should hold: its first part
-- ARGV[2i]     the lease of key i, in milliseconds; empty: the key keeps the time that it has left
--
-- Returns one tag for each key: kept: renewed, lost: no longer the owner's, or not a string
--         {kept, task id}: renewed, but that task asks the owner to stop

-- Fast path: one key, which its owner has. It precedes the prelude, whose definitions take longer than this.
if #KEYS == 1 then
  local key, owner, lease = unpack(KEYS), unpack(ARGV)
  local holder = redis.pcall('GET', key)
  if type(holder) == 'string' then
    local is_sent = string.sub(holder, 1, 1) == '^'  -- SENDING, which becomes RESERVED
    local value = is_sent and '~' .. string.sub(holder, 2) or holder
    if OWNS(owner, value) and not string.find(value, ' <', 1, true) then
      if is_sent then redis.call('SETRANGE', key, 0, '~') end
      if lease ~= '' then redis.call('PEXPIRE', key, lease) end
      return 'kept'
    end
  end
end

-- The prelude stands here.

local reply = {}
for i, key in ipairs(KEYS) do
  local value = redis.pcall('GET', key)  -- fails if the key is not a string; the others must be renewed all the same
  local owner = ARGV[2 * i - 1]
  reply[i] = 'lost'
  if type(value) == 'string' and (OWNS(owner, value) or is_owned_by(owner, value)) then
    if state_of(value) == SENDING and value ~= owner then redis.call('SETRANGE', key, 0, RESERVED) end
    if ARGV[2 * i] ~= '' then redis.call('PEXPIRE', key, ARGV[2 * i]) end
    local by = asked_by(value)
    reply[i] = by and {'kept', by} or 'kept'
  end
end
return reply
