"""Engines and block leases in Redis."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_services.errors import StoreUnavailable
from kvtide_services.store import scripts
from kvtide_services.store.redis_guard import guarded, milliseconds

_ENGINES = "kvtide:engines"
_INCARNATION = "kvtide:incarnation"


class RedisEngines:
    """EngineStore and LeaseStore."""

    def __init__(self, client: Any, seconds: float) -> None:
        self._redis = client
        self._seconds = seconds
        self._drop_lease = client.register_script(scripts.DROP_LEASE)

    @guarded
    async def put_engines(self, statuses: Sequence[pb.EngineStatus], ttl: timedelta) -> None:
        if not statuses:
            return
        pipe = self._redis.pipeline(transaction=False)
        pipe.sadd(_ENGINES, *(status.engine.name for status in statuses))
        for status in statuses:
            pipe.set(_engine_key(status.engine.name), status.SerializeToString(), px=milliseconds(ttl))
        await pipe.execute()

    @guarded
    async def drop_engine(self, name: str) -> None:
        pipe = self._redis.pipeline(transaction=False)
        await pipe.delete(_engine_key(name)).srem(_ENGINES, name).execute()

    @guarded
    async def engines(self) -> list[pb.EngineStatus]:
        names = sorted(name.decode() for name in await self._redis.smembers(_ENGINES))
        known, *values = await self._redis.mget(_INCARNATION, *map(_engine_key, names))
        if known is None:
            raise StoreUnavailable
        return [pb.EngineStatus.FromString(value) for value in values if value]

    @guarded
    async def incarnation(self) -> str:
        return (await self._redis.get(_INCARNATION) or b"").decode()

    @guarded
    async def begin(self, incarnation: str) -> str:
        pipe = self._redis.pipeline(transaction=False)
        held = (await pipe.set(_INCARNATION, incarnation, nx=True).get(_INCARNATION).execute())[1]
        return held.decode() if held else ""

    @guarded
    async def put_leases(self, leases: Sequence[pb.Lease]) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for lease in leases:
            key, ttl = leases_key(lease.tenant, lease.session_id), milliseconds(lease.ttl.ToTimedelta())
            pipe.hset(key, lease.lease_id, lease.SerializeToString())
            # The key lives as long as the longest of its leases.
            pipe.pexpire(key, ttl, nx=True)
            pipe.pexpire(key, ttl, gt=True)
        await pipe.execute()

    @guarded
    async def drop_leases(self, leases: Sequence[pb.Lease]) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for lease in leases:
            pipe.hget(leases_key(lease.tenant, lease.session_id), lease.lease_id)
        found = await pipe.execute()
        for lease, raw in zip(leases, found, strict=True):
            if raw is not None and _succeeds(lease, pb.Lease.FromString(raw)):
                key = leases_key(lease.tenant, lease.session_id)
                await self._drop_lease(keys=[key], args=[lease.lease_id, raw], client=pipe)
        await pipe.execute()


def _succeeds(ended: pb.Lease, stored: pb.Lease) -> bool:
    return stored.boot_id == ended.boot_id and stored.epoch <= ended.epoch


def _engine_key(name: str) -> str:
    return f"kvtide:engine:{name}"


def leases_key(tenant: str, session_id: str) -> str:
    return f"kvtide:{{{tenant}}}:leases:{session_id}"
