"""The store over Redis or Valkey."""

import asyncio
from datetime import timedelta

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_services.store import Held
from kvtide_services.store.redis_engines import RedisEngines, leases_key
from kvtide_services.store.redis_guard import guarded
from kvtide_services.store.redis_sessions import RedisSessions, session_keys


class RedisStore(RedisEngines, RedisSessions):
    """Every operation is a fixed number of round trips, or a script; all raise StoreUnavailable."""

    def __init__(self, url: str, timeout: timedelta, connections: int, history: int, watches: int) -> None:
        """``history``: events kept per tenant; ``watches``: how many wait at once. Raises ValueError for a bad URL."""
        seconds = timeout.total_seconds()
        # No socket_timeout: redis-py would use asyncio.wait_for, which on Python 3.11 loses a cancellation that comes
        # with the reply; each operation has a limit as a whole instead. No retries: callers have their own budget.
        # RESP2, since replies differ by protocol.
        retry = Retry(NoBackoff(), 0)
        common = {"socket_connect_timeout": seconds, "socket_timeout": None, "protocol": 2, "retry": retry}
        quick = BlockingConnectionPool.from_url(url, max_connections=connections, timeout=seconds, **common)
        waiting = ConnectionPool.from_url(url, max_connections=watches, **common)
        client, waiter = Redis.from_pool(quick), Redis.from_pool(waiting)
        RedisEngines.__init__(self, client, seconds)
        RedisSessions.__init__(self, client, waiter, seconds, history)
        self._clients = (client, waiter)

    @guarded
    async def held(self, tenant: str, session_id: str) -> Held:
        pipe = self._redis.pipeline(transaction=False)
        pipe.hvals(leases_key(tenant, session_id)).hget(session_keys(tenant, session_id)[0], "turns")
        leases, turns = await pipe.execute()
        return Held(tuple(pb.Lease.FromString(value) for value in leases), int(turns or 0))

    async def aclose(self) -> None:
        """Closes the connections."""
        await asyncio.gather(*(client.aclose() for client in self._clients))
