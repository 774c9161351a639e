"""Atomic operations of the Redis store. Each script's first lines are its contract.

Times come from the server, so that no host's clock enters; keys of one tenant share a hash tag.
"""

_HEAD = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local function emit(kind, id) redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[1], '*', 'k', kind, 's', id) end
"""

CREATE = (
    _HEAD
    + """
-- KEYS: record, deadlines, events. ARGV: history, id, ttl ms, request id, model, labels.
-- 1: created, or created before by the same request. 0: another request's live session is there.
if redis.call('EXISTS', KEYS[1]) == 1 then
  local other = redis.call('HGET', KEYS[1], 'request_id')
  return (ARGV[4] ~= '' and other == ARGV[4]) and 1 or 0
end
redis.call('HSET', KEYS[1], 'granted', ARGV[3], 'request_id', ARGV[4], 'model', ARGV[5], 'labels', ARGV[6],
  'turns', 0, 'used', now)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[2])
emit('opened', ARGV[2])
return 1
"""
)

RENEW = (
    _HEAD
    + """
-- KEYS: record, deadlines, events. ARGV: history, id, ttl ms (0: as granted last).
-- The time left in ms, never less than before; -1: the session is gone.
local left = redis.call('PTTL', KEYS[1])
if left < 0 then return -1 end
local ttl = tonumber(ARGV[3])
if ttl == 0 then ttl = tonumber(redis.call('HGET', KEYS[1], 'granted')) end
if ttl > left then
  left = ttl
  redis.call('PEXPIRE', KEYS[1], left)
  redis.call('ZADD', KEYS[2], now + left, ARGV[2])
end
redis.call('HSET', KEYS[1], 'granted', ttl, 'used', now)
return left
"""
)

RECORD_TURN = (
    _HEAD
    + """
-- KEYS: record, deadlines, events. ARGV: history, id, ttl ms, turn, model, engine, boot id.
-- The time left in ms. Opens the session when it is new; a turn that is counted already only renews.
local left = redis.call('PTTL', KEYS[1])
if left < 0 then
  redis.call('HSET', KEYS[1], 'granted', ARGV[3], 'request_id', '', 'labels', '{}', 'turns', 0)
  left = 0
  emit('opened', ARGV[2])
end
if tonumber(ARGV[4]) > tonumber(redis.call('HGET', KEYS[1], 'turns') or 0) then
  redis.call('HSET', KEYS[1], 'turns', ARGV[4], 'model', ARGV[5], 'engine', ARGV[6], 'boot', ARGV[7])
  emit('turn', ARGV[2])
end
redis.call('HSET', KEYS[1], 'used', now)
left = math.max(left, tonumber(ARGV[3]))
redis.call('PEXPIRE', KEYS[1], left)
redis.call('ZADD', KEYS[2], now + left, ARGV[2])
return left
"""
)

CLOSE = (
    _HEAD
    + """
-- KEYS: record, deadlines, events. ARGV: history, id. 1: closed now. 0: there was none.
redis.call('ZREM', KEYS[2], ARGV[2])
if redis.call('DEL', KEYS[1]) == 0 then return 0 end
emit('closed', ARGV[2])
return 1
"""
)

LAPSE = (
    _HEAD
    + """
-- KEYS: (unused), deadlines, events. ARGV: history. Ids whose deadline passed; removed, so that one caller gets each.
local ids = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 1000)
for _, id in ipairs(ids) do
  redis.call('ZREM', KEYS[2], id)
  emit('lapsed', id)
end
return ids
"""
)

DROP_LEASE = """
-- KEYS: the session's leases. ARGV: lease id, the serialised lease as it was put.
-- 1: removed. 0: gone, or another grant took its place.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
"""
