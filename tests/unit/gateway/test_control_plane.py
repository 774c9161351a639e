"""Routing away, hanging, back again; health, models, version, metrics."""

import asyncio
from datetime import timedelta
from typing import Any


async def test_without_routing_the_last_d_computes_all_and_still_holds(deployment: Any) -> None:
    await deployment.start()
    await deployment.chat(conversation_id="s1")
    await deployment.control.stop()
    got = await deployment.chat(conversation_id="s1")
    assert (got.status, got.headers["x-kvtide-strategy"]) == (200, "DECODE_ONLY")
    assert got.headers["x-kvtide-reason"] == "control plane away"
    directive = deployment.decode.seen[1].directive
    assert (directive.retain, directive.turn) == (True, 2)


async def test_a_routing_service_that_hangs_costs_its_timeout_only(deployment: Any) -> None:
    await deployment.start(plan_timeout=timedelta(seconds=0.1))
    await deployment.chat()
    deployment.control.hold_plans = asyncio.Event()
    got = await deployment.chat()
    deployment.control.hold_plans.set()
    assert got.headers["x-kvtide-reason"] == "control plane away"


async def test_routing_that_was_never_there_is_503(deployment: Any) -> None:
    await deployment.start()
    await deployment.control.stop()
    got = await deployment.chat()
    assert (got.status, got.error["code"]) == (503, "control_plane_away")
    assert (await deployment.get("/v1/models")).status == 503


async def test_routing_that_comes_back_is_asked_again_at_once(deployment: Any) -> None:
    await deployment.start(reconnect_backoff=timedelta(seconds=0.1))
    await deployment.chat()
    address = deployment.control.address
    await deployment.control.stop()
    await deployment.chat()
    await deployment.control.start(address)
    for _ in range(100):
        got = await deployment.chat()
        if got.headers["x-kvtide-strategy"] == "PREFILL_REUSE":
            break
    assert got.headers["x-kvtide-strategy"] == "PREFILL_REUSE"


async def test_a_d_that_routing_has_lost_but_that_lives_still_answers(deployment: Any) -> None:
    await deployment.start()
    await deployment.chat()
    deployment.control.decodes.clear()
    got = await deployment.chat()
    assert (got.status, got.headers["x-kvtide-strategy"]) == (200, "DECODE_ONLY")
    assert got.headers["x-kvtide-reason"] == "routing knows no decode engine now"


async def test_without_routing_a_dead_d_is_503(deployment: Any) -> None:
    await deployment.start()
    await deployment.chat()
    await deployment.control.stop()
    await deployment.decode.stop()
    assert (await deployment.chat()).status == 503


async def test_models_are_those_of_routing_else_the_known_ones(deployment: Any) -> None:
    await deployment.start()
    rows = (await deployment.get("/v1/models")).body
    assert rows["object"] == "list"
    assert [(row["id"], row["object"], row["owned_by"]) for row in rows["data"]] == [("tiny", "model", "kvtide")]
    await deployment.chat()
    await deployment.control.stop()
    again = (await deployment.get("/v1/models")).body
    assert again == rows


async def test_health_needs_routing_and_a_decode_engine(deployment: Any) -> None:
    await deployment.start()
    assert (await deployment.get("/health")).status == 200
    deployment.control.decodes.clear()
    got = await deployment.get("/health")
    assert (got.status, got.body["reason"]) == (503, "no decode engine is attached")
    await deployment.control.stop()
    got = await deployment.get("/health")
    assert got.status == 503
    assert "does not answer" in got.body["reason"]


async def test_version_and_metrics(deployment: Any) -> None:
    await deployment.start()
    assert set((await deployment.get("/version")).body) == {"version"}
    await deployment.chat(conversation_id="s1")
    requests = 'kvtide_gateway_requests_total{route="/v1/chat/completions",status="200",strategy="PREFILL_REUSE"}'
    assert await deployment.metric(requests) == 1
    assert await deployment.metric("kvtide_gateway_reused_tokens_total") == 96
    for stage in ("plan", "prefill", "first_byte"):
        assert await deployment.metric(f'kvtide_gateway_seconds_count{{stage="{stage}"}}') == 1
