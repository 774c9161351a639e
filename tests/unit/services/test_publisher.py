"""The store's copy of the mirror: complete after changes, outages and flushes."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_services.errors import StoreUnavailable
from kvtide_services.lease.mirror import Change, Mirror
from kvtide_services.lease.publisher import Publisher
from kvtide_services.store.memory import MemoryStore

BEAT = timedelta(seconds=1)


class Fickle:
    """A store that can be away, and emptied."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self.away = False
        self.put = asyncio.Event()
        self.flush()

    def flush(self) -> None:
        self.inner = MemoryStore(self._clock, history=10)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any) -> Any:
            if self.away:
                raise StoreUnavailable
            result = await getattr(self.inner, name)(*args)
            if name == "put_leases" and args[0]:
                self.put.set()
            return result

        return call


class World:
    def __init__(self, clock: Any, engine: Any) -> None:
        ids = map(str, itertools.count(1))
        self.store: Any = Fickle(clock)
        self.mirror = Mirror(clock, patience=3)
        self.publisher = Publisher(self.mirror, self.store, BEAT, lambda: next(ids))
        self.engine = engine()

    def hello(self, *leases: pb.Lease, **fields: Any) -> None:
        self.engine.MergeFrom(pb.Engine(**fields))
        hello = pb.Hello(protocol_version=1, engine=self.engine, leases=leases)
        self.publisher.changed(self.mirror.hello(hello))

    def granted(self, lease: pb.Lease) -> None:
        self.publisher.changed(self.mirror.granted(self.engine, lease))

    def ended(self, lease_id: str, epoch: int = 1) -> None:
        self.publisher.changed(self.mirror.ended(self.engine, pb.LeaseEnded(lease_id=lease_id, epoch=epoch)))

    async def published(self) -> list[str]:
        return [f"{found.lease_id}.{found.epoch}" for found in (await self.store.held("acme", "s1")).leases]


@pytest.fixture
async def world(clock: Any, engine: Any) -> World:
    made = World(clock, engine)
    await made.publisher.publish_beat()
    return made


async def test_an_engine_is_published_when_it_attaches_and_at_each_beat(world: World, clock: Any) -> None:
    world.hello()
    await world.publisher.publish_changes()
    assert [s.engine.name for s in await world.store.engines()] == ["decode-0"]
    clock.now += 2
    world.mirror.heard(world.engine, pb.Beat(clock_stamp=5))
    await world.publisher.publish_beat()
    clock.now += 2
    assert [s.beat.clock_stamp for s in await world.store.engines()] == [5]
    clock.now += 1
    assert await world.store.engines() == []


async def test_changes_end_in_the_order_of_grants(world: World, lease: Any) -> None:
    world.hello()
    world.granted(lease(epoch=1))
    world.ended("l1", epoch=1)
    world.granted(lease(epoch=2))
    world.granted(lease("l2"))
    world.ended("l2")
    await world.publisher.publish_changes()
    assert await world.published() == ["l1.2"]


async def test_what_happens_while_the_store_is_away_is_published_later(world: World, lease: Any) -> None:
    world.hello(lease("l1"), lease("l2"))
    await world.publisher.publish_changes()
    world.store.away = True
    world.ended("l1")
    world.granted(lease("l3"))
    with pytest.raises(StoreUnavailable):
        await world.publisher.publish_changes()
    with pytest.raises(StoreUnavailable):
        await world.publisher.publish_beat()
    world.store.away = False
    await world.publisher.publish_beat()
    await world.publisher.publish_changes()
    assert sorted(await world.published()) == ["l2.1", "l3.1"]


async def test_an_emptied_store_gets_everything_again_with_the_time_left(world: World, lease: Any, clock: Any) -> None:
    world.hello(lease(ttl=100))
    await world.publisher.publish_changes()
    before = await world.store.incarnation()
    clock.now += 30
    world.mirror.heard(world.engine, pb.Beat())
    world.store.flush()
    await world.publisher.publish_beat()
    (found,) = (await world.store.held("acme", "s1")).leases
    assert found.ttl.ToTimedelta() == timedelta(seconds=70)
    assert [s.leases for s in await world.store.engines()] == [1]
    assert await world.store.incarnation() != before


async def test_a_flush_that_another_replica_noticed_first_is_noticed(world: World, lease: Any) -> None:
    world.hello(lease())
    await world.publisher.publish_changes()
    world.store.flush()
    await world.store.begin("another's")
    await world.publisher.publish_beat()
    assert await world.published() == ["l1.1"]
    assert await world.store.incarnation() == "another's"


async def test_a_store_is_not_told_everything_at_every_beat(world: World, lease: Any) -> None:
    world.hello(lease())
    await world.publisher.publish_changes()
    await world.store.drop_leases([lease()])
    await world.publisher.publish_beat()
    assert await world.published() == []


async def test_an_engine_that_is_gone_is_taken_out_with_its_leases(world: World, lease: Any, clock: Any) -> None:
    world.hello(lease())
    await world.publisher.publish_changes()
    clock.now += 3
    for gone in world.mirror.expire():
        dropped = tuple(held.lease for held in gone.held.values())
        world.publisher.changed(Change(gone.engine.name, dropped=dropped))
    await world.publisher.publish_changes()
    assert (await world.store.engines(), await world.published()) == ([], [])


async def test_a_restarted_engine_takes_the_leases_of_its_former_start_along(world: World, lease: Any) -> None:
    world.hello(lease())
    await world.publisher.publish_changes()
    world.hello(boot_id="decode-0-2")
    await world.publisher.publish_changes()
    assert await world.published() == []


async def test_running_publishes_changes_as_they_come(world: World, lease: Any) -> None:
    running = asyncio.create_task(world.publisher.run())
    world.hello(lease())
    async with asyncio.timeout(5):
        await world.store.put.wait()
    assert await world.published() == ["l1.1"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()
