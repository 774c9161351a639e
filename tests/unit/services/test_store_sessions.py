"""Sessions and their events: what every store does."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from kvtide_services.errors import InvalidToken
from kvtide_services.store import FIRST_TOKEN, Opening, SessionRecord, TurnRecord

NOW = timedelta(0)
IDLE = timedelta(seconds=60)


def record(session_id: str = "s1", tenant: str = "acme", ttl: float = 120, **fields: Any) -> SessionRecord:
    span = timedelta(seconds=ttl)
    return SessionRecord(tenant, session_id, span, span, NOW, **fields)


def turn(number: int, engine: str = "decode-0") -> TurnRecord:
    return TurnRecord(number, "m", engine, f"{engine}-1")


async def kinds(store: Any, after: str = FIRST_TOKEN) -> list[str]:
    return [f"{e.kind} {e.session_id}" for e in await store.events("acme", after, NOW)]


def about(span: timedelta, seconds: float) -> bool:
    return timedelta(seconds=seconds - 2) < span <= timedelta(seconds=seconds)


async def test_a_session_is_kept_as_it_was_opened(store: Any) -> None:
    labels = {"team": "α", "x": ""}
    assert await store.create(record(model="m", request_id="r1", labels=labels)) is Opening.OPENED
    found = await store.get("acme", "s1")
    assert about(found.ttl, 120)
    assert (found.granted_ttl, found.model, found.labels) == (timedelta(seconds=120), "m", labels)
    assert (found.turns, found.decode_engine) == (0, "")


async def test_only_the_request_that_opened_a_session_may_repeat(store: Any) -> None:
    await store.create(record(request_id="r1"))
    assert await store.create(record(request_id="r1")) is Opening.REPEATED
    assert await store.create(record(request_id="r2")) is Opening.TAKEN
    await store.create(record("anonymous"))
    assert await store.create(record("anonymous")) is Opening.TAKEN
    assert await kinds(store) == ["opened s1", "opened anonymous"]


async def test_of_two_that_open_a_session_at_once_one_does(store: Any) -> None:
    outcomes = await asyncio.gather(*(store.create(record(request_id=f"r{i}")) for i in range(8)))
    assert sorted(outcomes) == [Opening.TAKEN] * 7 + [Opening.OPENED]


async def test_another_tenants_session_is_not_there(store: Any) -> None:
    await store.create(record())
    assert await store.get("evil", "s1") is None
    assert await store.renew("evil", ["s1"], None) == [None]
    assert not await store.close("evil", "s1")
    assert await store.page("evil", "", 10) == ([], "")


async def test_a_closed_session_is_gone_and_closed_once(store: Any) -> None:
    await store.create(record())
    assert await store.close("acme", "s1")
    assert not await store.close("acme", "s1")
    assert await store.get("acme", "s1") is None
    assert await kinds(store) == ["opened s1", "closed s1"]
    assert await store.lapse() == []


async def test_renewal_extends_and_never_shortens(aged: Any) -> None:
    await aged.store.create(record(ttl=100))
    assert about((await aged.store.renew("acme", ["s1"], timedelta(seconds=10)))[0], 100)
    await aged.advance(95)
    (left,) = await aged.store.renew("acme", ["s1"], timedelta(seconds=50))
    assert about(left, 50)
    await aged.advance(30)
    assert about((await aged.store.renew("acme", ["s1"], None))[0], 50)
    assert about((await aged.store.get("acme", "s1")).ttl, 50)


async def test_many_are_renewed_at_once_and_the_lost_are_told_apart(store: Any) -> None:
    ids = [f"s{i}" for i in range(1200)]
    for session_id in ids[:3]:
        await store.create(record(session_id))
    renewed = await store.renew("acme", [*ids[:2], "", *ids[3:], ids[2]], None)
    assert [left is not None for left in renewed] == [True, True] + [False] * 1198 + [True]


async def test_a_lapsed_session_is_not_resurrected_by_renewal(aged: Any) -> None:
    await aged.store.create(record(ttl=10))
    await aged.advance(10)
    assert await aged.store.renew("acme", ["s1"], timedelta(seconds=60)) == [None]
    assert await aged.store.get("acme", "s1") is None
    assert not await aged.store.close("acme", "s1")


async def test_lapses_are_found_once_and_after_renewals_only(aged: Any) -> None:
    for name, tenant in (("s1", "acme"), ("s2", "acme"), ("s3", "other")):
        await aged.store.create(record(name, tenant, ttl=10))
    await aged.store.renew("acme", ["s2"], timedelta(seconds=30))
    await aged.advance(10)
    found = await asyncio.gather(*(aged.store.lapse() for _ in range(4)))
    assert sorted(pair for part in found for pair in part) == [("acme", "s1"), ("other", "s3")]
    assert (await kinds(aged.store))[-1] == "lapsed s1"
    assert [r.session_id for r in (await aged.store.page("acme", "", 10))[0]] == ["s2"]


async def test_a_session_that_is_opened_again_before_the_sweep_lapsed_first(aged: Any) -> None:
    await aged.store.create(record(ttl=10))
    await aged.advance(10)
    await aged.store.create(record(ttl=10))
    assert await aged.store.lapse() == []
    assert await kinds(aged.store) == ["opened s1", "lapsed s1", "opened s1"]


async def test_a_turn_opens_a_new_session_and_is_counted_once(aged: Any) -> None:
    first = await aged.store.record_turn("acme", "s1", turn(1), IDLE)
    assert first.opened and about(first.left, 60)
    await aged.advance(20)
    again = await aged.store.record_turn("acme", "s1", turn(1, "decode-9"), IDLE)
    assert not again.opened and about(again.left, 60)
    found = await aged.store.get("acme", "s1")
    assert (found.turns, found.model, found.decode_engine, found.decode_boot_id) == (1, "m", "decode-0", "decode-0-1")
    assert await kinds(aged.store) == ["opened s1", "turn s1"]


async def test_a_turn_leaves_a_longer_lease_alone_and_ends_idleness(aged: Any) -> None:
    await aged.store.create(record(ttl=3600))
    await aged.advance(30)
    assert (await aged.store.get("acme", "s1")).idle >= timedelta(seconds=30)
    counted = await aged.store.record_turn("acme", "s1", turn(4), IDLE)
    assert not counted.opened and about(counted.left, 3570)
    found = await aged.store.get("acme", "s1")
    assert found.turns == 4 and found.idle < timedelta(seconds=5)


async def test_pages_follow_the_order_of_ids_and_skip_the_lapsed(aged: Any) -> None:
    for name in ("b", "a", "d", "c", "ü"):
        await aged.store.create(record(name, ttl=10 if name in "bc" else 100))
    await aged.advance(10)
    names, after = [], ""
    for _ in range(3):
        rows, after = await aged.store.page("acme", after, 2)
        names.append([row.session_id for row in rows])
    assert (names, after) == ([["a"], ["d"], ["ü"]], "")


async def test_events_follow_a_token(store: Any) -> None:
    assert await store.last_token("acme") == FIRST_TOKEN
    await store.create(record("s1"))
    token = await store.last_token("acme")
    await store.create(record("s2"))
    assert await kinds(store, token) == ["opened s2"]
    assert await kinds(store, await store.last_token("acme")) == []


async def test_an_event_wakes_who_waits_for_it(store: Any) -> None:
    waiting = asyncio.create_task(store.events("acme", FIRST_TOKEN, timedelta(seconds=30)))
    await asyncio.sleep(0)
    await store.create(record("other", tenant="other"))
    await store.create(record())
    assert [event.session_id for event in await waiting] == ["s1"]


@pytest.mark.parametrize("token", ["x", "", "1", "+", "-", "1-1 ", "1-\u0661", "123-4"])
async def test_a_token_that_was_not_issued_is_refused(store: Any, token: str) -> None:
    await store.create(record())
    with pytest.raises(InvalidToken):
        await store.events("acme", token, NOW)


@pytest.mark.parametrize("first", [True, False])
async def test_a_token_older_than_the_history_is_refused(aged: Any, first: bool) -> None:
    await aged.store.create(record())
    token = FIRST_TOKEN if first else await aged.store.last_token("acme")
    for number in range(4 * aged.history):
        await aged.store.record_turn("acme", "s1", turn(number + 1), IDLE)
    with pytest.raises(InvalidToken):
        await aged.store.events("acme", token, NOW)
