"""Clocks, engines, leases, and the store in both implementations."""

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
import redis.asyncio as redis

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_services.store import Store
from kvtide_services.store.memory import MemoryStore
from kvtide_services.store.redis import RedisStore

HISTORY = 100


class Clock:
    """Turned by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


MakeEngine = Callable[..., pb.Engine]
MakeLease = Callable[..., pb.Lease]


@pytest.fixture
def engine() -> MakeEngine:
    def make(name: str = "decode-0", **fields: Any) -> pb.Engine:
        role = pb.ENGINE_ROLE_PREFILL if name.startswith("prefill") else pb.ENGINE_ROLE_DECODE
        known = {"boot_id": f"{name}-1", "role": role, "model": "m", "http_url": f"http://{name}"}
        return pb.Engine(name=name, **(known | {"block_size": 32, "pairing_digest": "x"} | fields))

    return make


@pytest.fixture
def lease() -> MakeLease:
    def make(lease_id: str = "l1", ttl: float = 120, **fields: Any) -> pb.Lease:
        known = {"epoch": 1, "engine": "decode-0", "boot_id": "decode-0-1", "tenant": "acme", "session_id": "s1"}
        made = pb.Lease(lease_id=lease_id, **(known | {"turn": 1, "num_tokens": 640} | fields))
        made.ttl.FromTimedelta(timedelta(seconds=ttl))
        return made

    return make


class Aged:
    """A store and a way to let time pass in it."""

    def __init__(self, store: Store, advance: Callable[[float], Awaitable[None]]) -> None:
        self.store = store
        self.advance = advance
        self.history = HISTORY


@pytest.fixture(params=["memory", "redis"])
async def aged(request: pytest.FixtureRequest, clock: Clock) -> AsyncIterator[Aged]:
    """Both implementations, empty."""
    if request.param == "memory":

        async def advance(seconds: float) -> None:
            clock.now += seconds

        yield Aged(MemoryStore(clock, HISTORY), advance)
        return
    client = redis.from_url(request.getfixturevalue("valkey_url"), protocol=2)
    await client.flushall()
    store = RedisStore(request.getfixturevalue("valkey_url"), timedelta(seconds=5), 8, HISTORY, 8)
    yield Aged(store, lambda seconds: age(client, round(seconds * 1000)))
    await store.aclose()
    await client.aclose()


async def age(client: Any, milliseconds: int) -> None:
    """Lets time pass in Redis: shortens every TTL and deadline by as much."""
    for key in await client.keys("kvtide:*"):
        left = await client.pttl(key)
        if left >= 0:
            await client.pexpire(key, max(0, left - milliseconds))
        if key.endswith(b":sessions"):
            for member, score in await client.zrange(key, 0, -1, withscores=True):
                await client.zadd(key, {member: score - milliseconds})
        if b":session:" in key and await client.exists(key):
            await client.hincrby(key, "used", -milliseconds)


@pytest.fixture
def store(aged: Aged) -> Store:
    return aged.store
