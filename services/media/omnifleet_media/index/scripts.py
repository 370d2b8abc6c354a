"""What the Redis index does in one atomic step, in Lua. Every script may run twice: a caller whose answer was lost asks again.

Keys, all under one prefix P:
    Po:MEDIA     hash    body: the object as JSON; bytes; a:ALIAS for each alias that leads here
    Pf:FRAME     hash    MEDIA -> "height width", for each object that refers to the frame
    Pa:ALIAS     string  media digest
    Ps:SOURCE    string  bytes of the source
    Pg:KEY       hash    body: the segment as JSON; media, bytes
    Puse:UNIT    zset    digest by last use, one for each kind of unit
    Pl:LEASE     hash    owner, run, expires, digests
    Ph:DIGEST    zset    lease by expiry: who holds the unit
    Pleases, Pr:RUN      zset  lease by expiry, of all runs and of one
    Pw:KEY       string  owner of a flight, with a time to live
    Pstores      set     stores that the index knows
"""

from __future__ import annotations

PRELUDE = """
local p = ARGV[1]
local function is_held(digest, now)
  return redis.call('ZCOUNT', p..'h:'..digest, '('..now, '+inf') > 0
end
local function segment_is_held(key, now)
  if is_held(key, now) then return true end
  local media = redis.call('HGET', p..'g:'..key, 'media')
  return media and is_held(media, now)
end
local function drop(lease)
  local found = redis.call('HMGET', p..'l:'..lease, 'digests', 'run')
  if not found[1] then return 0 end
  for digest in string.gmatch(found[1], '%S+') do redis.call('ZREM', p..'h:'..digest, lease) end
  redis.call('DEL', p..'l:'..lease)
  redis.call('ZREM', p..'leases', lease)
  redis.call('ZREM', p..'r:'..found[2], lease)
  return 1
end
"""

WRITE_OBJECT = """
local media, alias, body, shape, used = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
redis.call('HSETNX', p..'o:'..media, 'body', body)
redis.call('HSET', p..'o:'..media, 'bytes', ARGV[7])
if alias ~= '' then
  local before = redis.call('GET', p..'a:'..alias)
  if before and before ~= media then redis.call('HDEL', p..'o:'..before, 'a:'..alias) end
  redis.call('SET', p..'a:'..alias, media)
  redis.call('DEL', p..'w:'..alias)
  redis.call('HSET', p..'o:'..media, 'a:'..alias, '')
end
if ARGV[8] ~= '' then
  redis.call('SET', p..'s:'..ARGV[8], ARGV[9])
  redis.call('ZADD', p..'use:source', 'GT', used, ARGV[8])
end
for i = 10, #ARGV do redis.call('HSET', p..'f:'..ARGV[i], media, shape) end
redis.call('ZADD', p..'use:object', 'GT', used, media)
"""

FIND_OBJECT = """
local media = redis.call('GET', p..'a:'..ARGV[2])
return media and redis.call('HGET', p..'o:'..media, 'body')
"""

WRITE_SOURCE = """
redis.call('SET', p..'s:'..ARGV[2], ARGV[3])
redis.call('ZADD', p..'use:source', 'GT', ARGV[4], ARGV[2])
"""

WRITE_SEGMENT = """
redis.call('HSET', p..'g:'..ARGV[2], 'body', ARGV[3], 'media', ARGV[4], 'bytes', ARGV[5])
redis.call('ZADD', p..'use:segment', 'GT', ARGV[6], ARGV[2])
redis.call('DEL', p..'w:'..ARGV[2])
"""

TAKE_LEASE = """
local id, owner, run, expires = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
if redis.call('EXISTS', p..'l:'..id) == 1 then return {} end
local missing, digests = {}, {}
for i = 6, #ARGV do
  local d = ARGV[i]
  digests[#digests + 1] = d
  if redis.call('EXISTS', p..'o:'..d, p..'s:'..d, p..'g:'..d) == 0 then missing[#missing + 1] = d end
end
if #missing > 0 then return missing end
redis.call('HSET', p..'l:'..id, 'owner', owner, 'run', run, 'expires', expires, 'digests', table.concat(digests, ' '))
redis.call('ZADD', p..'leases', expires, id)
redis.call('ZADD', p..'r:'..run, expires, id)
for _, d in ipairs(digests) do redis.call('ZADD', p..'h:'..d, expires, id) end
return {}
"""

# A server that was killed may have lost the last seconds of its file: what it knew is believed of its own life only.
LIFE = "local life = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')\n"

MEMORY = (
    LIFE
    + """
local memory = redis.call('HGET', p..'memory', ARGV[2])
return memory and string.find(memory, life, 1, true) == 1 and memory or ''
"""
)

BEGIN_TELLING = (
    LIFE
    + """
local telling = life..'-'..ARGV[2]
redis.call('SET', p..'t:'..telling, 1, 'EX', ARGV[3])
return telling
"""
)

MARK_STORE = (
    LIFE
    + """
local store, telling = ARGV[2], ARGV[3]
local memory = redis.call('HGET', p..'memory', store)
if memory and string.find(memory, life, 1, true) == 1 then return 1 end
if string.find(telling, life, 1, true) ~= 1 or redis.call('DEL', p..'t:'..telling) == 0 then return 0 end
redis.call('HSET', p..'memory', store, telling)
return 1
"""
)

RENEW_LEASE = """
local id, expires, now = ARGV[2], ARGV[3], ARGV[4]
local found = redis.call('HMGET', p..'l:'..id, 'expires', 'owner', 'run', 'digests')
if not found[1] or tonumber(found[1]) <= tonumber(now) then return false end
redis.call('HSET', p..'l:'..id, 'expires', expires)
redis.call('ZADD', p..'leases', expires, id)
redis.call('ZADD', p..'r:'..found[3], expires, id)
for digest in string.gmatch(found[4], '%S+') do redis.call('ZADD', p..'h:'..digest, expires, id) end
return {found[2], found[3]}
"""

RELEASE_LEASE = "return drop(ARGV[2])"

HELD = """
local sizes, seen = {}, {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', p..'r:'..ARGV[2], '('..ARGV[3], '+inf')) do
  local digests = redis.call('HGET', p..'l:'..id, 'digests')
  for d in string.gmatch(digests or '', '%S+') do
    if not seen[d] then
      seen[d] = true
      local size = redis.call('HGET', p..'o:'..d, 'bytes') or redis.call('HGET', p..'g:'..d, 'bytes')
      sizes[#sizes + 1] = d
      sizes[#sizes + 1] = size or redis.call('GET', p..'s:'..d) or '0'
    end
  end
end
return sizes
"""

HELD_BLOBS = """
local now, answer = ARGV[2], {}
for i = 3, #ARGV, 2 do
  local kind, d = ARGV[i], ARGV[i + 1]
  local held = false
  if kind == 'frame' then
    for _, media in ipairs(redis.call('HKEYS', p..'f:'..d)) do
      if is_held(media, now) then held = true break end
    end
  elseif kind == 'segment' then held = segment_is_held(d, now)
  else held = is_held(d, now) end
  answer[#answer + 1] = held and 1 or 0
end
return answer
"""

IDLE = """
local now, limit = ARGV[2], tonumber(ARGV[3])
for _, id in ipairs(redis.call('ZRANGEBYSCORE', p..'leases', '-inf', now, 'LIMIT', 0, 1000)) do drop(id) end
local found = {}
for _, unit in ipairs({'object', 'source', 'segment'}) do
  local taken, from = 0, 0
  while taken < limit do
    local page = redis.call('ZRANGE', p..'use:'..unit, from, from + 255, 'WITHSCORES')
    if #page == 0 then break end
    for i = 1, #page, 2 do
      local held
      if unit == 'segment' then held = segment_is_held(page[i], now) else held = is_held(page[i], now) end
      if not held and taken < limit then
        found[#found + 1] = {tonumber(page[i + 1]), unit, page[i]}
        taken = taken + 1
      end
    end
    from = from + 256
  end
end
table.sort(found, function(a, b) return a[1] < b[1] end)
local answer = {}
for i = tonumber(ARGV[4]) + 1, math.min(#found, limit) do
  answer[#answer + 1] = found[i][2]
  answer[#answer + 1] = found[i][3]
end
return answer
"""

FORGET = """
local unit, d, now = ARGV[2], ARGV[3], ARGV[4]
local held
if unit == 'segment' then held = segment_is_held(d, now) else held = is_held(d, now) end
if held or redis.call('ZREM', p..'use:'..unit, d) == 0 then return false end
if unit == 'source' then redis.call('DEL', p..'s:'..d) return {'source', d} end
if unit == 'segment' then redis.call('DEL', p..'g:'..d) return {'segment', d} end
local names = {'manifest', d}
local object = redis.call('HGETALL', p..'o:'..d)
redis.call('DEL', p..'o:'..d)
for i = 1, #object, 2 do
  local field = object[i]
  if field == 'body' then
    for _, frame in ipairs(cjson.decode(object[i + 1]).frames) do
      if redis.call('HDEL', p..'f:'..frame, d) == 1 and redis.call('EXISTS', p..'f:'..frame) == 0 then
        names[#names + 1] = 'frame'
        names[#names + 1] = frame
      end
    end
  elseif string.sub(field, 1, 2) == 'a:' then
    if redis.call('GET', p..field) == d then redis.call('DEL', p..field) end
  end
end
return names
"""

TAKE_FLIGHT = """
local key = p..'w:'..ARGV[2]
local known = redis.call('EXISTS', p..'a:'..ARGV[2], p..'g:'..ARGV[2]) > 0
if known and ARGV[5] == '1' then return 'known' end
local owner = redis.call('GET', key)
if owner and owner ~= ARGV[3] then return 'others' end
redis.call('SET', key, ARGV[3], 'PX', ARGV[4])
return known and 'known' or 'ours'
"""

END_FLIGHT = """
if redis.call('GET', p..'w:'..ARGV[2]) == ARGV[3] then redis.call('DEL', p..'w:'..ARGV[2]) end
"""
