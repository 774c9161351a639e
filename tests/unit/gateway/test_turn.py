"""A turn that goes well: what each engine gets, and what the client gets."""

import json
from typing import Any

import pytest

from kvtide.lease.v1 import directive_pb2 as pb


async def test_whole_answer_passes_byte_for_byte_with_headers_that_explain_it(deployment: Any) -> None:
    await deployment.start()
    got = await deployment.chat({"X-Session-ID": "s1", "X-Request-Id": "mine"})
    assert (got.status, got.raw) == (200, deployment.whole)
    assert got.headers["content-length"] == str(len(deployment.whole))
    assert got.headers["content-type"].startswith("application/json")
    shown = {name: got.headers[f"x-kvtide-{name}"] for name in ("strategy", "reused-tokens", "reason", "session")}
    assert shown == {
        "strategy": "PREFILL_REUSE",
        "reused-tokens": "96",
        "reason": "d1 holds 96 tokens",
        "session": "s1",
    }
    assert got.headers["x-request-id"] == "mine"
    assert got.headers["x-kvtide-timing"].startswith("plan;dur=")


async def test_stream_passes_byte_for_byte(deployment: Any) -> None:
    await deployment.start()
    got = await deployment.chat(stream=True, conversation_id="s1")
    assert got.raw == b"".join(deployment.events)
    assert got.headers["content-type"] == "text/event-stream; charset=utf-8"


async def test_prefill_leg_computes_one_token_under_a_signed_directive(deployment: Any) -> None:
    await deployment.start()
    asked = {"stream": True, "stream_options": {"include_usage": True}, "min_tokens": 5, "max_tokens": 50}
    await deployment.chat(conversation_id="s1", temperature=0.25, max_completion_tokens=40, **asked)
    (seen,) = deployment.prefill.seen
    assert seen.path == "/v1/chat/completions"
    body = seen.body
    params = body.pop("kv_transfer_params")
    assert body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.25,
        "stream": False,
        "n": 1,
        "max_tokens": 1,
        "max_completion_tokens": 1,
    }
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    message = seen.directive
    assert (message.leg, message.strategy) == (pb.LEG_PREFILL, pb.STRATEGY_PREFILL_REUSE)
    assert (message.tenant, message.session_id, message.turn, message.retain) == ("default", "s1", 1, False)
    assert message.lease == pb.LeaseRef(lease_id="l1", epoch=3, engine="d1", boot_id="d1-boot")
    assert seen.headers["x-request-id"] == message.attempt_id


async def test_decode_leg_is_the_clients_request_with_p_s_reference(deployment: Any) -> None:
    await deployment.start()
    fields = {"temperature": 0.25, "stop": ["\ud800", "ü"], "seed": 2**60, "max_tokens": 50, "logit_bias": {"5": 1e-7}}
    await deployment.chat(conversation_id="s1", **fields)
    body = deployment.decode.seen[0].body
    params = body.pop("kv_transfer_params")
    assert body == {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
    assert params.pop("kvtide")
    stock = deployment.prefill_answer()["kv_transfer_params"]
    del stock["kvtide_prefill"]
    assert params == stock
    message = deployment.decode.seen[0].directive
    assert (message.leg, message.retain) == (pb.LEG_DECODE, True)
    assert not message.HasField("lease")
    reference = message.prefill
    assert (reference.num_tokens, reference.last_block_hash) == (130, bytes.fromhex("ab" * 32))
    assert (list(reference.tail_token_ids), reference.lease_duration.nanos) == ([5, 6], 500_000_000)
    assert (reference.pairing_digest, reference.reader_clock_stamp) == ("pair", deployment.stamp)
    assert message.attempt_id == deployment.prefill.seen[0].directive.attempt_id


async def test_reuse_of_nothing_is_called_fresh_with_p_s_reason(deployment: Any) -> None:
    await deployment.start()
    answer = deployment.prefill_answer(reused=0, reason="the ticket was refused")
    deployment.prefill.default = deployment.prefill.json(answer)
    got = await deployment.chat(conversation_id="s1")
    assert (got.headers["x-kvtide-strategy"], got.headers["x-kvtide-reused-tokens"]) == ("PREFILL_FRESH", "0")
    assert got.headers["x-kvtide-reason"] == "the ticket was refused"
    assert deployment.decode.seen[0].directive.strategy == pb.STRATEGY_PREFILL_FRESH


async def test_decode_direct_goes_to_d_alone_with_the_lease(deployment: Any) -> None:
    await deployment.start(force_strategy="DECODE_DIRECT")
    got = await deployment.chat(conversation_id="s1")
    assert (got.headers["x-kvtide-strategy"], got.headers["x-kvtide-reused-tokens"]) == ("DECODE_DIRECT", "96")
    assert got.headers["x-kvtide-reason"].startswith("up to 96 tokens")
    assert not deployment.prefill.seen
    (seen,) = deployment.decode.seen
    assert seen.directive.lease.lease_id == "l1"
    assert list(seen.body["kv_transfer_params"]) == ["kvtide"]


async def test_decode_only_carries_a_directive_and_nothing_else(deployment: Any) -> None:
    await deployment.start(force_strategy="DECODE_ONLY")
    await deployment.chat(conversation_id="s1")
    (seen,) = deployment.decode.seen
    assert list(seen.body["kv_transfer_params"]) == ["kvtide"]
    assert not seen.directive.HasField("lease")
    assert not seen.directive.HasField("prefill")
    assert seen.directive.retain


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_clients_own_params_never_reach_an_engine(deployment: Any, path: str) -> None:
    await deployment.start()
    evil = {"do_remote_prefill": True, "remote_block_ids": [[666]], "kvtide": {"directive": "(evil)", "mac": "(evil)"}}
    body = {"model": "tiny", "prompt": "hi", "kv_transfer_params": evil, "conversation_id": "s1"}
    body["vllm_xargs"] = {"kv_transfer_params": "(evil)", "kept": 1}
    assert (await deployment.post(path, json.dumps(body).encode())).status == 200
    for seen in (*deployment.prefill.seen, *deployment.decode.seen):
        assert seen.path == path
        assert b"[666]" not in seen.raw
        assert b"(evil)" not in seen.raw
        assert "conversation_id" not in seen.body
        assert seen.body["vllm_xargs"] == {"kept": 1}
        assert seen.directive.session_id == "s1"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 2}, "several answers"),
        ({"best_of": 3}, "several answers"),
        ({"use_beam_search": True}, "several answers"),
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": [[1], [2]]}, "several prompts"),
        ({"echo": True}, "logprobs"),
        ({"prompt_logprobs": 0}, "logprobs"),
        ({"prompt_embeds": "AAAA"}, "embeddings"),
    ],
)
async def test_what_cannot_share_one_reference_runs_on_d_and_is_not_held(
    deployment: Any, fields: dict[str, Any], why: str
) -> None:
    await deployment.start()
    body = {"model": "tiny", "prompt": "hi", "conversation_id": "s1", **fields}
    got = await deployment.post("/v1/completions", json.dumps(body).encode())
    assert got.headers["x-kvtide-strategy"] == "DECODE_ONLY"
    assert why in got.headers["x-kvtide-reason"]
    assert not deployment.prefill.seen
    assert not deployment.decode.seen[0].directive.retain


async def test_one_prompt_in_any_shape_takes_both_legs(deployment: Any) -> None:
    await deployment.start()
    for prompt in ("hi", [1, 2, 3], ["hi"], [[1, 2]]):
        body = {"model": "tiny", "prompt": prompt, "n": 1, "best_of": 1, "echo": False}
        got = await deployment.post("/v1/completions", json.dumps(body).encode())
        assert got.headers["x-kvtide-strategy"] == "PREFILL_REUSE"


async def test_without_a_session_nothing_is_held_or_recorded(deployment: Any) -> None:
    await deployment.start()
    deployment.control.strategy = "PREFILL_FRESH"
    got = await deployment.chat()
    assert "x-kvtide-session" not in got.headers
    assert deployment.control.plans[0].session_id == ""
    assert not deployment.decode.seen[0].directive.retain
    assert await deployment.metric('kvtide_gateway_turn_reports_total{outcome="ok"}') == 0


@pytest.mark.parametrize(("default", "header", "held"), [("auto", "none", False), ("none", "auto", True)])
async def test_retention_is_the_clients_choice(deployment: Any, default: str, header: str, held: bool) -> None:
    await deployment.start(retention=default)
    await deployment.chat({"X-Kvtide-Retention": header}, conversation_id="s1")
    assert deployment.decode.seen[0].directive.retain is held
    await deployment.chat(conversation_id="s2")
    assert deployment.decode.seen[1].directive.retain is not held


async def test_five_megabytes_pass(deployment: Any) -> None:
    await deployment.start()
    text = "word " * 1_000_000
    got = await deployment.chat(messages=[{"role": "user", "content": text}])
    assert got.status == 200
    assert deployment.decode.seen[0].body["messages"][0]["content"] == text


async def test_the_session_service_learns_of_the_turn(deployment: Any) -> None:
    await deployment.start(service_api_key="op")
    await deployment.chat(conversation_id="s1")
    await deployment.control.recorded.wait()
    ((tenant, record),) = deployment.control.records
    assert (tenant, record.session_id, record.turn, record.model) == ("default", "s1", 1, "tiny")
    assert (record.decode_engine, record.decode_boot_id) == ("d1", "d1-boot")
    assert deployment.control.metadata[0]["authorization"] == "Bearer op"


async def test_the_next_plan_waits_for_the_turn_that_just_ended_and_counts_on(deployment: Any) -> None:
    await deployment.start()
    for _ in range(2):
        await deployment.chat(conversation_id="s1", stream=True)
    await deployment.chat(conversation_id="other")
    assert [plan.await_turn for plan in deployment.control.plans] == [0, 1, 0]
    assert [seen.directive.turn for seen in deployment.decode.seen] == [1, 2, 1]


async def test_a_session_service_that_fails_costs_a_count_and_nothing_else(deployment: Any) -> None:
    await deployment.start()
    deployment.control.record_error = True
    assert (await deployment.chat(conversation_id="s1")).status == 200
    while not await deployment.metric('kvtide_gateway_turn_reports_total{outcome="failed"}'):
        assert deployment.control.records == []
