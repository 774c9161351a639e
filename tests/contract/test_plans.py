"""Plans, as the gateway gets them."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from kvtide.lease.v1 import directive_pb2 as dpb
from kvtide.routing.v1 import routing_pb2


async def test_a_session_that_is_held_is_read_back(services: Any, client: Any, lease: Any, eventually: Any) -> None:
    await services.attach("prefill-0")
    await services.attach("decode-0", lease(epoch=7, turn=5, num_tokens=4928))

    async def reuse() -> Any:
        plan = await client.plan()
        return plan if plan.strategy == dpb.STRATEGY_PREFILL_REUSE and plan.decode.clock_stamp else None

    plan = await eventually(reuse)
    assert plan.reason == "D decode-0 holds 4,928 tokens of this session (turn 5)"
    assert (plan.prefill.engine.http_url, plan.decode.engine.http_url) == ("http://prefill-0", "http://decode-0")
    assert plan.lease == dpb.LeaseRef(lease_id="l1", epoch=7, engine="decode-0", boot_id="decode-0-1")
    assert (plan.lease_tokens, plan.turn) == (4928, 6)


async def test_what_is_not_held_is_computed(services: Any, client: Any) -> None:
    await services.attach("decode-0")
    plan = await client.plan()
    assert (plan.strategy, plan.HasField("prefill"), plan.turn) == (dpb.STRATEGY_DECODE_ONLY, False, 1)
    await services.attach("prefill-0")
    fresh = await client.plan(session_id="")
    assert (fresh.strategy, fresh.reason) == (dpb.STRATEGY_PREFILL_FRESH, "the request names no session")
    other = await client.plan(avoid_engines=["prefill-0"])
    assert other.strategy == dpb.STRATEGY_DECODE_ONLY


async def test_a_strategy_can_be_forced(services: Any, client: Any, lease: Any, eventually: Any) -> None:
    await services.attach("prefill-0")
    await services.attach("decode-0", lease())

    async def forced() -> bool:
        plan = await client.plan(force=dpb.STRATEGY_DECODE_DIRECT)
        return plan.strategy == dpb.STRATEGY_DECODE_DIRECT and plan.reason.startswith("forced; D decode-0 holds")

    assert await eventually(forced)
    assert (await client.plan(force=dpb.STRATEGY_DECODE_ONLY)).reason.startswith("forced;")


async def test_a_plan_waits_for_a_report_under_way(services: Any, client: Any, lease: Any) -> None:
    await services.stop()
    await services.start(plan_await=timedelta(seconds=8))
    link = await services.attach("decode-0")
    planning = asyncio.create_task(client.plan(await_turn=1, force=dpb.STRATEGY_DECODE_DIRECT))
    await link.send(granted=lease())
    assert (await planning).lease.lease_id == "l1"


async def test_models_are_those_of_decode_engines(services: Any, client: Any) -> None:
    await services.attach("decode-0", model="b")
    await services.attach("decode-1", model="a")
    await services.attach("prefill-0", model="c")
    found = await client.call(client.routing.ListModels, routing_pb2.ListModelsRequest())
    assert list(found.models) == ["a", "b"]


async def test_without_a_decode_engine_there_is_no_plan(client: Any, failure: Any) -> None:
    assert await failure(client.plan()) == ("UNAVAILABLE", "NO_DECODE_ENGINE", {"model": "m"})


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"model": ""}, "model"),
        ({"await_turn": -1}, "await_turn"),
        ({"session_id": "x" * 257}, "session_id"),
        ({"force": 99}, "force"),
    ],
)
async def test_bad_input(client: Any, failure: Any, wrong: dict[str, Any], field: str) -> None:
    code, reason, metadata = await failure(client.plan(**wrong))
    assert (code, reason, metadata["field"]) == ("INVALID_ARGUMENT", "INVALID_FIELD", field)
