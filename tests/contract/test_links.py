"""Engine links: who is attached, what they hold, and how it survives restarts and flushes."""

import asyncio
from typing import Any

import grpc
import pytest

from kvtide.lease.v1 import lease_pb2 as pb

HOLDS = "D decode-0 holds 640 tokens of this session (turn 1)"


async def held(client: Any, session_id: str = "s1") -> list[str]:
    found = await client.call(client.leases.ListLeases, pb.ListLeasesRequest(session_id=session_id))
    return [lease.lease_id for lease in found.leases]


async def test_an_engine_is_welcomed_and_listed(services: Any, client: Any) -> None:
    link = await services.attach()
    assert await client.engines() == ["decode-0"]
    await link.close()


async def test_what_an_engine_grants_and_ends_is_in_the_directory(
    services: Any, client: Any, lease: Any, eventually: Any
) -> None:
    link = await services.attach("decode-0", lease("l1"))
    assert await held(client) == ["l1"]
    await link.send(granted=lease("l2", epoch=3))
    assert await eventually(lambda: held(client)) and await eventually(lambda: _is(client, ["l1", "l2"]))
    got = await client.call(client.leases.GetLease, pb.GetLeaseRequest(lease_id="l2"))
    assert (got.lease.epoch, got.lease.engine, got.lease.boot_id) == (3, "decode-0", "decode-0-1")
    assert 0 < got.lease.ttl.seconds <= 100
    await link.send(ended=pb.LeaseEnded(lease_id="l1", epoch=1, reason=pb.LEASE_END_REASON_EVICTED))
    assert await eventually(lambda: _is(client, ["l2"]))


async def _is(client: Any, ids: list[str]) -> bool:
    return await held(client) == ids


async def test_leases_are_paged(services: Any, client: Any, lease: Any) -> None:
    await services.attach("decode-0", *(lease(f"l{number}") for number in range(5)))
    token, pages = "", []
    for _ in range(3):
        request = pb.ListLeasesRequest(page_size=2, page_token=token)
        answer = await client.call(client.leases.ListLeases, request)
        pages.append([found.lease_id for found in answer.leases])
        token = answer.next_page_token
    assert (pages, token) == ([["l0", "l1"], ["l2", "l3"], ["l4"]], "")


async def test_a_release_reaches_the_holder(services: Any, client: Any, lease: Any) -> None:
    link = await services.attach("decode-0", lease("l1", epoch=4), lease("l2"), lease("l3", session_id="s2"))
    one = await client.call(client.leases.ReleaseLeases, pb.ReleaseLeasesRequest(session_id="s1", lease_id="l1"))
    assert (one.released, (await link.read()).release) == (1, pb.LeaseRelease(lease_id="l1", epoch=4))
    every = await client.call(client.leases.ReleaseLeases, pb.ReleaseLeasesRequest(session_id="s1"))
    assert every.released == 2
    assert {(await link.read()).release.lease_id for _ in range(2)} == {"l1", "l2"}
    none = await client.call(client.leases.ReleaseLeases, pb.ReleaseLeasesRequest(session_id="unknown"))
    assert none.released == 0


async def test_a_restart_ends_the_leases_of_the_start_before(
    services: Any, client: Any, lease: Any, eventually: Any
) -> None:
    old = await services.attach("decode-0", lease())
    await eventually(lambda: _reason(client, HOLDS))
    await services.attach("decode-0", boot_id="decode-0-2")
    assert await held(client) == []
    assert await eventually(lambda: _reason(client, "no prefill engine can be paired; nothing of this session is held"))
    assert await old.read() is grpc.aio.EOF


async def _reason(client: Any, end: str) -> bool:
    try:
        return bool((await client.plan()).reason.endswith(end))
    except grpc.aio.AioRpcError:
        return False


async def test_a_restarted_lease_service_learns_everything_again(
    services: Any, client: Any, lease: Any, eventually: Any
) -> None:
    link = await services.attach("decode-0", lease())
    await services.stop()
    assert await link.read() is grpc.aio.EOF
    await link.close()
    await services.start()
    assert await client.engines() == []
    await services.attach("decode-0", lease())
    assert await held(client) == ["l1"]
    assert await eventually(lambda: _reason(client, HOLDS))


async def test_an_emptied_store_is_filled_again_within_a_beat(
    services: Any, client: Any, lease: Any, eventually: Any, valkey: Any
) -> None:
    await services.attach("prefill-0")
    await services.attach("decode-0", lease())
    await eventually(lambda: _reason(client, HOLDS))
    await valkey.flushall()
    plan = await client.plan()
    assert plan.decode.engine.name == "decode-0"
    assert await eventually(lambda: _reason(client, HOLDS), within=5)


async def test_a_store_that_is_away_breaks_no_link_and_misses_nothing(
    services: Any, client: Any, lease: Any, eventually: Any, valkey: Any
) -> None:
    await services.attach("prefill-0")
    link = await services.attach("decode-0", lease("l1"), lease("l2", session_id="s2"))
    await eventually(lambda: _reason(client, HOLDS))
    await valkey.client_pause(3000)
    away = await client.plan()
    assert (away.reason, away.decode.engine.name) == ("the store does not answer", "decode-0")
    await link.send(ended=pb.LeaseEnded(lease_id="l1", epoch=1))
    await link.send(granted=lease("l3", turn=2))
    assert await eventually(lambda: _is(client, ["l3"]))
    assert await eventually(lambda: _reason(client, "(turn 2)"))
    assert (await client.plan(session_id="s2")).reason == HOLDS


async def test_a_restarted_engine_ends_no_other_link(services: Any, client: Any) -> None:
    first, second = await services.attach("decode-0"), await services.attach("decode-1")
    await first.close()
    await services.attach("decode-0", boot_id="decode-0-2")
    assert await client.engines() == ["decode-0", "decode-1"]
    reading = asyncio.create_task(second.read())
    await client.engines()
    assert not reading.done()
    reading.cancel()


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"protocol_version": 4}, "protocol_version"),
        ({"name": ""}, "engine.name"),
        ({"boot_id": ""}, "engine.boot_id"),
        ({"http_url": ""}, "engine.http_url"),
        ({"role": pb.ENGINE_ROLE_UNSPECIFIED}, "engine.role"),
    ],
)
async def test_an_engine_that_cannot_take_part_is_refused(
    client: Any, failure: Any, wrong: dict[str, Any], field: str
) -> None:
    known = {"name": "d", "boot_id": "b", "role": pb.ENGINE_ROLE_DECODE, "model": "m", "http_url": "h"}
    version = wrong.pop("protocol_version", 1)
    engine = pb.Engine(**(known | {"block_size": 32, "pairing_digest": "x"} | wrong))
    call = client.leases.Attach(metadata=client.metadata)
    await call.write(pb.AttachRequest(hello=pb.Hello(protocol_version=version, engine=engine)))
    code, reason, metadata = await failure(call.read())
    assert (code, reason, metadata["field"]) == ("FAILED_PRECONDITION", "INCOMPATIBLE_ENGINE", field)
    assert await client.engines() == []


@pytest.mark.parametrize("first", [pb.AttachRequest(beat=pb.Beat()), pb.AttachRequest()])
async def test_a_link_starts_with_hello(client: Any, failure: Any, first: pb.AttachRequest) -> None:
    call = client.leases.Attach(metadata=client.metadata)
    await call.write(first)
    code, reason, metadata = await failure(call.read())
    assert (code, reason, metadata["field"]) == ("INVALID_ARGUMENT", "INVALID_FIELD", "message")


@pytest.mark.parametrize(
    ("method", "request_", "expected"),
    [
        ("GetLease", pb.GetLeaseRequest(lease_id="x"), ("NOT_FOUND", "LEASE_NOT_FOUND", {"lease_id": "x"})),
        ("GetLease", pb.GetLeaseRequest(), ("INVALID_ARGUMENT", "INVALID_FIELD", "lease_id")),
        ("ListLeases", pb.ListLeasesRequest(page_size=-1), ("INVALID_ARGUMENT", "INVALID_FIELD", "page_size")),
        ("ListLeases", pb.ListLeasesRequest(page_token="x"), ("INVALID_ARGUMENT", "INVALID_TOKEN", "page_token")),
        ("ListLeases", pb.ListLeasesRequest(page_token="ü"), ("INVALID_ARGUMENT", "INVALID_TOKEN", "page_token")),
        ("ReleaseLeases", pb.ReleaseLeasesRequest(), ("INVALID_ARGUMENT", "INVALID_FIELD", "session_id")),
    ],
)
async def test_bad_input(client: Any, failure: Any, method: str, request_: Any, expected: tuple[Any, ...]) -> None:
    code, reason, metadata = await failure(client.call(getattr(client.leases, method), request_))
    assert (code, reason) == expected[:2]
    assert metadata == expected[2] if isinstance(expected[2], dict) else metadata["field"] == expected[2]
