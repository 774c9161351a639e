"""What a plan is made from, and how long it waits for it."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_services.errors import NoDecodeEngine, StoreUnavailable
from kvtide_services.routing.choice import FRESH, ONLY, REUSE, Plan, Why
from kvtide_services.routing.directory import EngineDirectory
from kvtide_services.routing.router import Patience, Policy, Router, Wanted
from kvtide_services.store import Held, TurnRecord
from kvtide_services.store.memory import MemoryStore

LONG = timedelta(hours=1)


class Fickle(MemoryStore):
    """A store that can be away, and counts how often it was asked for engines."""

    away = False
    asked = 0
    hang: asyncio.Event | None = None

    async def engines(self) -> list[pb.EngineStatus]:
        self.asked += 1
        self._check()
        if self.hang is not None:
            await self.hang.wait()
        return await super().engines()

    async def held(self, tenant: str, session_id: str) -> Held:
        self._check()
        return await super().held(tenant, session_id)

    def _check(self) -> None:
        if self.away:
            raise StoreUnavailable


class World:
    def __init__(self, clock: Any, forced: Any = 0) -> None:
        self.clock = clock
        self.store = Fickle(clock, history=10)
        self.directory = EngineDirectory(self.store, clock, timedelta(seconds=0.2), timedelta(seconds=60))
        self.slept: list[float] = []
        self.lease_after: tuple[int, pb.Lease] | None = None
        patience = Patience(0.05, 0.01, clock, self.sleep)
        self.router = Router(self.directory, self.store, patience, Policy(64, forced))

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.now += seconds
        if self.lease_after and len(self.slept) == self.lease_after[0]:
            await self.store.put_leases([self.lease_after[1]])

    async def attach(self, *engines: pb.Engine) -> None:
        await self.store.begin("i")
        await self.store.put_engines([pb.EngineStatus(engine=engine) for engine in engines], LONG)

    async def plan(self, **wanted: Any) -> Plan:
        return await self.router.plan(Wanted(**({"tenant": "acme", "model": "m", "session_id": "s1"} | wanted)))


@pytest.fixture
async def world(clock: Any, engine: Any) -> World:
    made = World(clock)
    await made.attach(engine("prefill-0"), engine("decode-0"))
    return made


async def test_turns_come_from_leases_and_records(world: World, lease: Any) -> None:
    assert (await world.plan()).turn == 1
    await world.store.record_turn("acme", "s1", TurnRecord(4, "m", "d", "b"), LONG)
    await world.store.put_leases([lease(turn=2)])
    assert (await world.plan()).turn == 5


async def test_another_tenant_finds_no_lease(world: World, lease: Any) -> None:
    await world.store.put_leases([lease()])
    assert (await world.plan()).strategy == REUSE
    assert (await world.plan(tenant="evil")).why is Why.NOTHING


async def test_a_plan_waits_for_the_turn_that_just_ended(world: World, lease: Any) -> None:
    await world.store.put_leases([lease(turn=1)])
    world.lease_after = (3, lease(turn=2, epoch=2))
    plan = await world.plan(await_turn=2)
    assert plan.lease is not None and plan.lease.turn == 2
    assert world.slept == [0.01] * 3


async def test_it_does_not_wait_for_ever_nor_for_nothing(world: World, lease: Any) -> None:
    await world.store.put_leases([lease(turn=1)])
    await world.plan(await_turn=1)
    assert world.slept == []
    assert (await world.plan(await_turn=2)).strategy == REUSE
    assert sum(world.slept) == pytest.approx(0.05, abs=0.011)


async def test_only_engines_of_the_model_that_are_not_to_be_avoided_are_planned(world: World, engine: Any) -> None:
    with pytest.raises(NoDecodeEngine):
        await world.plan(model="other")
    with pytest.raises(NoDecodeEngine):
        await world.plan(avoid=frozenset({"decode-0"}))
    assert (await world.plan(avoid=frozenset({"prefill-0"}))).strategy == ONLY
    assert await world.router.models() == ["m"]


async def test_a_setting_forces_and_a_request_overrides_it(clock: Any, engine: Any) -> None:
    world = World(clock, forced=ONLY)
    await world.attach(engine("prefill-0"), engine("decode-0"))
    assert (await world.plan()).strategy == ONLY
    assert (await world.plan(force=FRESH)).strategy == FRESH


async def test_engines_are_read_once_for_a_while(world: World, engine: Any) -> None:
    for _ in range(3):
        await world.plan()
    assert world.store.asked == 1
    await world.attach(engine("decode-1", model="new"))
    world.clock.now += 0.2
    assert (await world.plan(model="new")).decode.engine.name == "decode-1"
    assert world.store.asked == 2


async def test_plans_wait_for_no_list_while_it_is_kept_fresh(world: World, engine: Any) -> None:
    async def pass_by(seconds: float) -> None:
        world.clock.now += seconds
        await asyncio.sleep(0)

    keeping = asyncio.create_task(world.directory.keep_fresh(pass_by))
    for asked in (1, 2, 3):
        await asyncio.sleep(0)
        await world.plan()
        assert world.store.asked == asked
    await world.attach(engine("decode-1", model="new"))
    await asyncio.sleep(0)
    assert (await world.plan(model="new")).decode.engine.name == "decode-1"
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping


async def test_a_list_that_is_fresh_does_not_wait_for_the_next_reading(world: World) -> None:
    await world.plan()
    world.store.hang = asyncio.Event()
    keeping = asyncio.create_task(world.directory.keep_fresh(world.sleep))
    await asyncio.sleep(0)
    assert world.store.asked == 2
    async with asyncio.timeout(5):
        assert (await world.plan()).decode.engine.name == "decode-0"
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping


async def test_without_the_store_the_engines_last_known_plan_without_reuse(world: World, lease: Any) -> None:
    await world.store.put_leases([lease()])
    await world.plan()
    world.store.away = True
    world.clock.now += 59
    plan = await world.plan()
    assert (plan.strategy, plan.why) == (FRESH, Why.STORE_AWAY)
    asked = world.store.asked
    await world.plan()
    assert world.store.asked == asked
    world.clock.now += 2
    with pytest.raises(NoDecodeEngine):
        await world.plan()


async def test_an_emptied_store_does_not_make_engines_vanish(world: World) -> None:
    await world.plan()
    world.clock.now += 1
    world.store.__init__(world.clock, 10)  # type: ignore[misc]  # emptied in place
    assert (await world.plan()).decode.engine.name == "decode-0"


async def test_a_request_without_a_session_asks_nobody_about_one(world: World) -> None:
    await world.plan()
    world.store.away = True
    assert (await world.plan(session_id="", await_turn=0)).why is Why.NO_SESSION
