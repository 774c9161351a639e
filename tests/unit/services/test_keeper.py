"""What is granted, what is refused, and when blocks are let go."""

import itertools
from datetime import timedelta
from typing import Any

import pytest

from kvtide_services.errors import InvalidField, SessionExists, SessionNotFound
from kvtide_services.session.keeper import SessionKeeper, Terms
from kvtide_services.store import TurnRecord
from kvtide_services.store.memory import MemoryStore


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)


class World:
    def __init__(self, clock: Any) -> None:
        self.released: list[tuple[str, str]] = []
        self.store = MemoryStore(clock, history=10)
        terms = Terms(seconds(120), seconds(10), seconds(3600), seconds(60))
        ids = (f"made-{number}" for number in itertools.count(1))
        self.keeper = SessionKeeper(self.store, terms, self.release, lambda: next(ids))

    async def release(self, tenant: str, session_id: str) -> int:
        self.released.append((tenant, session_id))
        return 1

    async def create(self, session_id: str = "s1", ttl: float | None = None, **fields: Any) -> Any:
        span = None if ttl is None else seconds(ttl)
        known = {"model": "m", "labels": {}, "request_id": ""} | fields
        return await self.keeper.create("acme", session_id, span, **known)


@pytest.fixture
def world(clock: Any) -> World:
    return World(clock)


@pytest.mark.parametrize(("asked", "granted"), [(None, 120), (1, 10), (10, 10), (300, 300), (10**9, 3600)])
async def test_a_ttl_is_clamped(world: World, asked: float | None, granted: float) -> None:
    assert (await world.create(ttl=asked)).granted_ttl == seconds(granted)


async def test_a_session_without_a_name_gets_one(world: World) -> None:
    assert (await world.create("")).session_id == "made-1"


async def test_a_repeat_is_answered_like_the_first_and_another_is_refused(world: World) -> None:
    first = await world.create(request_id="r1", ttl=30)
    assert await world.create(request_id="r1", ttl=3000) == first
    with pytest.raises(SessionExists):
        await world.create(request_id="r2")


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("ttl", {"ttl": 0}),
        ("ttl", {"ttl": -5}),
        ("session_id", {"session_id": "x" * 257}),
        ("request_id", {"request_id": "x" * 129}),
        ("labels", {"labels": {str(number): "" for number in range(65)}}),
        ("labels", {"labels": {"": "x"}}),
        ("labels", {"labels": {"k" * 64: "x"}}),
        ("labels[k]", {"labels": {"k": "x" * 257}}),
    ],
)
async def test_what_is_out_of_range_is_refused_and_nothing_opened(
    world: World, field: str, bad: dict[str, Any]
) -> None:
    with pytest.raises(InvalidField) as raised:
        await world.create(**bad)
    assert raised.value.metadata["field"] == field
    assert await world.store.page("acme", "", 10) == ([], "")


async def test_closing_lets_blocks_go_even_of_a_session_that_is_not_known(world: World) -> None:
    await world.create()
    await world.keeper.close("acme", "s1")
    with pytest.raises(SessionNotFound):
        await world.keeper.close("acme", "s1")
    assert world.released == [("acme", "s1")] * 2


async def test_a_lapse_lets_blocks_go_once(world: World, clock: Any) -> None:
    await world.create(ttl=10)
    assert await world.keeper.sweep() == 0
    clock.now += 10
    assert await world.keeper.sweep() == 1
    assert await world.keeper.sweep() == 0
    assert world.released == [("acme", "s1")]


async def test_a_turn_gives_the_idle_ttl_and_takes_none_away(world: World, clock: Any) -> None:
    turn = TurnRecord(1, "m", "d", "b")
    assert await world.keeper.record_turn("acme", "new", turn) == seconds(60)
    await world.create(ttl=300)
    assert await world.keeper.record_turn("acme", "s1", turn) == seconds(300)


@pytest.mark.parametrize("number", [0, -1, 2**53 + 1])
async def test_turns_count_from_one(world: World, number: int) -> None:
    with pytest.raises(InvalidField):
        await world.keeper.record_turn("acme", "s1", TurnRecord(number, "m", "d", "b"))


async def test_unknown_sessions(world: World) -> None:
    for call in (world.keeper.get("acme", "s1"), world.keeper.renew("acme", "s1", None)):
        with pytest.raises(SessionNotFound):
            await call
    with pytest.raises(InvalidField):
        await world.keeper.get("acme", "")
    await world.create()
    kept = await world.keeper.keep_alive("acme", ["s1", "lost", "", "s1"])
    assert kept == [("s1", seconds(120)), ("lost", None), ("", None), ("s1", seconds(120))]
