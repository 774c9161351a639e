"""Legs that fail, and where the turn goes on."""

from datetime import timedelta
from typing import Any

import pytest

from kvtide.lease.v1 import directive_pb2 as pb


def strategies(engine: Any) -> list[str]:
    return [pb.Strategy.Name(seen.directive.strategy).removeprefix("STRATEGY_") for seen in engine.seen]


def failures(engine: Any) -> dict[str, Any]:
    answer = {"kv_transfer_params": {"kvtide_prefill": {"num_tokens": "many"}}}
    return {
        "500": engine.status(500),
        "404": engine.status(404),
        "429": engine.status(429),
        "dropped": engine.drop,
        "no object": engine.json([1]),
        "bad reference": engine.json(answer),
        "reference out of range": engine.json(_with(num_tokens=2**70)),
    }


def _with(**facts: Any) -> dict[str, Any]:
    whole = {"last_block_hash": "", "tail_token_ids": [], "lease_duration_s": 1, "pairing_digest": "", "num_tokens": 1}
    return {"kv_transfer_params": {"kvtide_prefill": whole | facts}}


@pytest.mark.parametrize(
    "how", ["500", "404", "429", "dropped", "no object", "bad reference", "reference out of range"]
)
async def test_reuse_that_fails_is_tried_fresh_then_on_d_alone_each_as_a_new_attempt(deployment: Any, how: str) -> None:
    await deployment.start()
    deployment.prefill.default = failures(deployment.prefill)[how]
    got = await deployment.chat(conversation_id="s1")
    assert (got.status, got.headers["x-kvtide-strategy"]) == (200, "DECODE_ONLY")
    assert "PREFILL_FRESH failed" in got.headers["x-kvtide-reason"]
    assert strategies(deployment.prefill) == ["PREFILL_REUSE", "PREFILL_FRESH"]
    assert strategies(deployment.decode) == ["DECODE_ONLY"]
    assert not deployment.prefill.seen[1].directive.HasField("lease")
    assert not deployment.decode.seen[0].directive.HasField("prefill")
    attempts = {s.directive.attempt_id for s in (*deployment.prefill.seen, *deployment.decode.seen)}
    assert len(attempts) == 3
    assert len(deployment.control.plans) == 1


async def test_a_second_try_of_p_that_works_is_used(deployment: Any) -> None:
    await deployment.start()
    deployment.prefill.script = [deployment.prefill.status(500)]
    got = await deployment.chat(conversation_id="s1")
    assert got.headers["x-kvtide-strategy"] == "PREFILL_FRESH"
    assert deployment.decode.seen[0].directive.HasField("prefill")
    cause = 'kvtide_gateway_fallbacks_total{reason="status",strategy="PREFILL_REUSE"}'
    assert await deployment.metric(cause) == 1


@pytest.mark.parametrize("answer", [{"choices": []}, {"kv_transfer_params": None}, {"kv_transfer_params": {"a": 1}}])
async def test_p_that_exports_nothing_leaves_it_to_d(deployment: Any, answer: dict[str, Any]) -> None:
    await deployment.start()
    deployment.prefill.default = deployment.prefill.json(answer)
    got = await deployment.chat(conversation_id="s1")
    assert got.headers["x-kvtide-strategy"] == "DECODE_ONLY"
    assert len(deployment.prefill.seen) == 1
    assert list(deployment.decode.seen[0].body["kv_transfer_params"]) == ["kvtide"]


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_p_s_refusal_of_the_request_is_the_answer(deployment: Any, status: int) -> None:
    await deployment.start()
    deployment.prefill.default = deployment.prefill.status(status, "prompt too long")
    got = await deployment.chat(conversation_id="s1")
    assert (got.status, got.error["message"]) == (status, "prompt too long")
    assert not deployment.decode.seen


async def test_d_s_refusal_passes_and_nothing_is_recorded(deployment: Any) -> None:
    await deployment.start()
    deployment.decode.default = deployment.decode.status(400, "max_tokens too large")
    got = await deployment.chat(conversation_id="s1", max_tokens=10**9)
    assert (got.status, got.error["message"]) == (400, "max_tokens too large")
    assert (len(deployment.decode.seen), deployment.control.records) == (1, [])


async def test_a_dead_p_is_avoided_for_another(deployment: Any) -> None:
    await deployment.start()
    other = await deployment.another()
    other.default = other.prefill
    deployment.control.prefills["p2"] = other.url
    await deployment.prefill.stop()
    got = await deployment.chat(conversation_id="s1")
    assert got.headers["x-kvtide-strategy"] == "PREFILL_FRESH"
    assert got.headers["x-kvtide-reason"] == "P: cannot be reached (PREFILL_REUSE failed)"
    assert list(deployment.control.plans[1].avoid_engines) == ["p1"]
    assert strategies(other) == ["PREFILL_FRESH"]


async def test_without_another_p_a_dead_one_leaves_it_to_d(deployment: Any) -> None:
    await deployment.start()
    await deployment.prefill.stop()
    got = await deployment.chat(conversation_id="s1")
    assert (got.status, got.headers["x-kvtide-strategy"]) == (200, "DECODE_ONLY")


async def test_a_p_that_hangs_is_given_up(deployment: Any) -> None:
    await deployment.start(prefill_timeout=timedelta(seconds=0.05))
    deployment.prefill.default = deployment.prefill.hang
    got = await deployment.chat(conversation_id="s1")
    assert got.headers["x-kvtide-strategy"] == "DECODE_ONLY"
    assert len(deployment.prefill.seen) == 1
    await deployment.prefill.cancelled.wait()


@pytest.mark.parametrize("how", ["500", "dropped", "stopped"])
async def test_a_d_that_fails_gives_way_to_another(deployment: Any, how: str) -> None:
    await deployment.start()
    other = await deployment.another()
    deployment.control.decodes["d2"] = other.url
    if how == "stopped":
        await deployment.decode.stop()
    else:
        deployment.decode.default = failures(deployment.decode)[how]
    got = await deployment.chat(conversation_id="s1")
    assert (got.status, got.raw, got.headers["x-kvtide-strategy"]) == (200, deployment.whole, "DECODE_ONLY")
    assert list(deployment.control.plans[1].avoid_engines) == ["d1"]
    (seen,) = other.seen
    assert not seen.directive.HasField("prefill")
    await deployment.control.recorded.wait()
    assert deployment.control.records[0][1].decode_engine == "d2"


async def test_the_only_d_is_tried_once_more_without_the_used_reference(deployment: Any) -> None:
    await deployment.start()
    deployment.decode.script = [deployment.decode.drop]
    got = await deployment.chat(conversation_id="s1")
    assert (got.status, got.headers["x-kvtide-strategy"]) == (200, "DECODE_ONLY")
    first, second = deployment.decode.seen
    assert first.directive.HasField("prefill")
    assert not second.directive.HasField("prefill")
    assert first.directive.attempt_id != second.directive.attempt_id


async def test_d_s_own_last_word_passes(deployment: Any) -> None:
    await deployment.start()
    deployment.decode.default = deployment.decode.status(500, "engine is dead")
    got = await deployment.chat()
    assert (got.status, got.error["message"]) == (500, "engine is dead")
    assert len(deployment.decode.seen) == 2


async def test_no_d_to_be_reached_is_503_with_retry_after(deployment: Any) -> None:
    await deployment.start()
    await deployment.decode.stop()
    got = await deployment.chat()
    assert (got.status, got.error["code"], got.headers["retry-after"]) == (503, "no_engine", "5")
    assert got.headers["x-kvtide-strategy"] == "DECODE_ONLY"
    assert got.headers["x-kvtide-reason"] == "D: cannot be reached (PREFILL_REUSE failed)"
    assert got.headers["x-request-id"]


async def test_a_d_that_hangs_is_504_and_not_tried_twice(deployment: Any) -> None:
    await deployment.start(first_byte_timeout=timedelta(seconds=0.05), idle_timeout=timedelta(seconds=0.05))
    deployment.decode.default = deployment.decode.hang
    got = await deployment.chat(stream=True)
    assert (got.status, got.error["code"]) == (504, "engine_timed_out")
    assert len(deployment.decode.seen) == 1
    await deployment.decode.cancelled.wait()


async def test_whole_answers_have_a_deadline_of_their_own(deployment: Any) -> None:
    short = {"first_byte_timeout": timedelta(seconds=0.01), "idle_timeout": timedelta(seconds=0.01)}
    await deployment.start(**short, answer_timeout=timedelta(seconds=0.1))
    deployment.decode.default = deployment.decode.hang
    assert (await deployment.chat()).status == 504


async def test_attempts_are_bounded(deployment: Any) -> None:
    await deployment.start(max_attempts=3)
    deployment.prefill.default = deployment.prefill.status(500)
    deployment.decode.default = deployment.decode.drop
    got = await deployment.chat(conversation_id="s1")
    assert (got.status, got.error["code"]) == (502, "engine_failed")
    assert len(deployment.prefill.seen) + len(deployment.decode.seen) == 3
