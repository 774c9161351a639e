"""Atomic operations of the Redis store. Each script's first comment is its contract.

Times come from the server, so that no host's clock enters; keys of one tenant share a hash tag. Where KEYS is "a
session's", it is: its record, the tenant's deadlines, events, ids.
"""

_HEAD = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local function emit(kind, id) redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[1], '*', 'k', kind, 's', id) end
local function keep(id, ttl)
  redis.call('PEXPIRE', KEYS[1], ttl)
  redis.call('ZADD', KEYS[2], now + ttl, id)
  redis.call('ZADD', KEYS[4], 0, id)
end
local function open(id)
  -- The sweep may not have met a predecessor whose record is gone already.
  if redis.call('ZSCORE', KEYS[2], id) then emit('lapsed', id) end
  emit('opened', id)
end
"""

CREATE = (
    _HEAD
    + """
-- KEYS: a session's. ARGV: history, id, ttl ms, request id, model, labels.
-- 1: opened. 2: opened before by the same request. 0: another request's live session is there.
if redis.call('EXISTS', KEYS[1]) == 1 then
  local other = redis.call('HGET', KEYS[1], 'request_id')
  return (ARGV[4] ~= '' and other == ARGV[4]) and 2 or 0
end
open(ARGV[2])
redis.call('HSET', KEYS[1], 'granted', ARGV[3], 'request_id', ARGV[4], 'model', ARGV[5], 'labels', ARGV[6],
  'turns', 0, 'used', now)
keep(ARGV[2], ARGV[3])
return 1
"""
)

RENEW = (
    _HEAD
    + """
-- KEYS: a session's. ARGV: history, id, ttl ms (0: as granted last).
-- The time left in ms, never less than before; -1: the session is gone.
local left = redis.call('PTTL', KEYS[1])
if left < 0 then return -1 end
local ttl = tonumber(ARGV[3])
if ttl == 0 then ttl = tonumber(redis.call('HGET', KEYS[1], 'granted')) end
if ttl > left then
  left = ttl
  keep(ARGV[2], left)
end
redis.call('HSET', KEYS[1], 'granted', ttl, 'used', now)
return left
"""
)

RECORD_TURN = (
    _HEAD
    + """
-- KEYS: a session's. ARGV: history, id, ttl ms, turn, model, engine, boot id.
-- {time left in ms, 1 when the session is new}. A turn that is counted already only renews.
local left = redis.call('PTTL', KEYS[1])
local new = left < 0
if new then
  open(ARGV[2])
  redis.call('HSET', KEYS[1], 'granted', ARGV[3], 'request_id', '', 'labels', '{}', 'turns', 0)
  left = 0
end
if tonumber(ARGV[4]) > tonumber(redis.call('HGET', KEYS[1], 'turns') or 0) then
  redis.call('HSET', KEYS[1], 'turns', ARGV[4], 'model', ARGV[5], 'engine', ARGV[6], 'boot', ARGV[7])
  emit('turn', ARGV[2])
end
redis.call('HSET', KEYS[1], 'used', now)
left = math.max(left, tonumber(ARGV[3]))
keep(ARGV[2], left)
return {left, new and 1 or 0}
"""
)

CLOSE = (
    _HEAD
    + """
-- KEYS: a session's. ARGV: history, id. 1: closed now. 0: there was none.
if redis.call('DEL', KEYS[1]) == 0 then return 0 end
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('ZREM', KEYS[4], ARGV[2])
emit('closed', ARGV[2])
return 1
"""
)

LAPSE = (
    _HEAD
    + """
-- KEYS: a session's, the first unused. ARGV: history. Up to 1000 ids whose deadline passed; one caller gets each.
local ids = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 1000)
for _, id in ipairs(ids) do
  redis.call('ZREM', KEYS[2], id)
  redis.call('ZREM', KEYS[4], id)
  emit('lapsed', id)
end
return ids
"""
)

RESUMABLE = """
-- KEYS: events. ARGV: token. 1: every event behind the token is still there. 0: some may be forgotten.
-- The token's own event is there, or it is the first token and nothing was trimmed.
if ARGV[1] ~= '0-0' then return #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]) end
if redis.call('EXISTS', KEYS[1]) == 0 then return 1 end
local facts, info = {}, redis.call('XINFO', 'STREAM', KEYS[1])
for i = 1, #info, 2 do facts[info[i]] = info[i + 1] end
return facts['entries-added'] == facts['length'] and 1 or 0
"""

DROP_LEASE = """
-- KEYS: the session's leases. ARGV: lease id, the record as it was read.
-- 1: removed. 0: gone, or another grant took its place since.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
"""
