"""Engines and leases: what every store does."""

from datetime import timedelta
from typing import Any

import pytest

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_services.errors import StoreUnavailable
from kvtide_services.store import Held, TurnRecord

TTL = timedelta(seconds=3)


async def test_a_store_without_an_incarnation_says_nothing_about_engines(store: Any, engine: Any) -> None:
    await store.put_engines([pb.EngineStatus(engine=engine())], TTL)
    with pytest.raises(StoreUnavailable):
        await store.engines()
    assert await store.begin("first") == "first"
    assert [s.engine.name for s in await store.engines()] == ["decode-0"]


async def test_the_first_incarnation_holds(store: Any) -> None:
    assert await store.incarnation() == ""
    assert await store.begin("first") == "first"
    assert await store.begin("second") == "first"
    assert await store.incarnation() == "first"


async def test_engines_are_listed_by_name_and_replaced(store: Any, engine: Any) -> None:
    await store.begin("i")
    await store.put_engines([], TTL)
    names = ["prefill-0", "decode-1", "decode-0"]
    await store.put_engines([pb.EngineStatus(engine=engine(name)) for name in names], TTL)
    status = pb.EngineStatus(engine=engine(boot_id="new"), beat=pb.Beat(clock_stamp=7), leases=3)
    await store.put_engines([status], TTL)
    found = await store.engines()
    assert [s.engine.name for s in found] == sorted(names)
    assert found[0] == status


async def test_an_engine_ends_with_its_ttl_or_when_it_is_dropped(aged: Any, engine: Any) -> None:
    await aged.store.begin("i")
    await aged.store.put_engines([pb.EngineStatus(engine=engine("decode-1"))], TTL)
    await aged.store.put_engines([pb.EngineStatus(engine=engine("decode-0"))], 10 * TTL)
    await aged.advance(3)
    assert [s.engine.name for s in await aged.store.engines()] == ["decode-0"]
    await aged.store.drop_engine("decode-0")
    assert await aged.store.engines() == []


async def test_leases_are_found_by_tenant_and_session_only(store: Any, lease: Any) -> None:
    mine, other, theirs = lease(), lease("l2", session_id="s2"), lease(tenant="evil")
    await store.put_leases([mine, other, theirs])
    assert await store.held("acme", "s1") == Held((mine,), 0)
    assert await store.held("evil", "s1") == Held((theirs,), 0)
    assert await store.held("evil", "s2") == Held((), 0)


async def test_turns_are_counted_until_the_record_is_gone_whatever_is_leased(aged: Any, lease: Any) -> None:
    await aged.store.put_leases([lease(turn=2)])
    await aged.store.record_turn("acme", "s1", TurnRecord(4, "m", "decode-0", "b"), TTL)
    await aged.store.record_turn("acme", "s2", TurnRecord(1, "m", "decode-0", "b"), TTL)
    assert await aged.store.held("acme", "s1") == Held((lease(turn=2),), 4)
    assert await aged.store.held("acme", "s2") == Held((), 1)
    assert (await aged.store.held("evil", "s1")).turns == 0
    await aged.advance(3)
    assert await aged.store.held("acme", "s1") == Held((lease(turn=2),), 0)


async def test_the_later_of_two_puts_of_a_lease_wins(store: Any, lease: Any) -> None:
    await store.put_leases([lease(epoch=1), lease(epoch=2)])
    assert [found.epoch for found in (await store.held("acme", "s1")).leases] == [2]


async def test_a_sessions_leases_last_as_long_as_the_longest(aged: Any, lease: Any) -> None:
    await aged.store.put_leases([lease("l1", ttl=60), lease("l2", ttl=10)])
    await aged.advance(59)
    assert len((await aged.store.held("acme", "s1")).leases) == 2
    await aged.advance(1)
    assert (await aged.store.held("acme", "s1")).leases == ()


@pytest.mark.parametrize(
    ("stored", "gone"),
    [({"epoch": 4}, True), ({"epoch": 5}, True), ({"epoch": 6}, False), ({"epoch": 4, "boot_id": "new"}, False)],
)
async def test_a_drop_spares_a_successor(store: Any, lease: Any, stored: dict[str, Any], gone: bool) -> None:
    await store.put_leases([lease(**stored), lease("l2")])
    await store.drop_leases([lease(epoch=5), lease("unknown")])
    found = (await store.held("acme", "s1")).leases
    assert {left.lease_id for left in found} == ({"l2"} if gone else {"l1", "l2"})
