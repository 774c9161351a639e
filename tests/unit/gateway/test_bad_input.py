"""Requests that cannot be served, and who may ask for what."""

import json
from typing import Any

import pytest

KEYS = {
    "keys": [
        {"key": "ka", "tenant": "acme"},
        {"key": "kb", "tenant": "bolt", "role": "client"},
        {"key": "ko", "tenant": "ops", "role": "operator"},
    ]
}


@pytest.fixture
async def locked(deployment: Any, tmp_path: Any) -> Any:
    (tmp_path / "keys.json").write_text(json.dumps(KEYS))
    await deployment.start(api_keys_file=str(tmp_path / "keys.json"))
    return deployment


async def test_what_is_no_json_object_is_refused_by_the_engine_itself(deployment: Any) -> None:
    deployment.decode.default = deployment.decode.status(400, "engine: not JSON")
    await deployment.start()
    for raw in (b"{", b"", b"\xff\xfe{}", b"[1]", b'"text"', b"7"):
        got = await deployment.post("/v1/chat/completions", raw)
        assert (got.status, got.error["message"]) == (400, "engine: not JSON")
        seen = deployment.decode.seen.pop()
        assert (seen.raw, seen.path) == (raw, "/v1/chat/completions")


@pytest.mark.parametrize("away", ["engine", "routing"])
async def test_without_an_engine_the_gateway_refuses_it(deployment: Any, away: str) -> None:
    await deployment.start()
    await (deployment.decode if away == "engine" else deployment.control).stop()
    got = await deployment.post("/v1/completions", b"{")
    assert (got.status, got.error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("raw", [b'{"kv_transfer_params": {"a": 1}', b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}"])
async def test_what_might_carry_params_past_the_gateway_reaches_no_engine(deployment: Any, raw: bytes) -> None:
    await deployment.start()
    got = await deployment.post("/v1/completions", raw)
    assert (got.status, got.error["code"]) == (400, "bad_request")
    assert not deployment.decode.seen


async def test_an_unknown_model_is_refused_by_the_engine_itself(deployment: Any) -> None:
    await deployment.start()
    for model in ("other", "", None, 5, "\ud800", "x" * 2000):
        got = await deployment.chat(model=model)
        assert (got.status, got.error["message"]) == (404, "engine: no such model")
        assert got.headers["x-kvtide-strategy"] == "DECODE_ONLY"


async def test_without_any_engine_a_request_is_503(deployment: Any) -> None:
    await deployment.start()
    deployment.control.decodes.clear()
    got = await deployment.chat()
    assert (got.status, got.error["code"], got.headers["retry-after"]) == (503, "no_engine", "5")


async def test_a_session_id_that_is_none_is_400(deployment: Any) -> None:
    await deployment.start()
    sessions: list[Any] = ["", "x" * 257, 5, [], "\ud800"]
    for session in sessions:
        got = await deployment.chat(conversation_id=session)
        assert (got.status, got.error["param"]) == (400, "conversation_id")
    assert not deployment.control.plans


async def test_the_body_names_the_session_before_the_header(deployment: Any) -> None:
    await deployment.start()
    await deployment.chat({"X-Session-ID": "header"}, conversation_id="x" * 256)
    await deployment.chat({"X-Session-ID": "header"}, conversation_id=None)
    assert (await deployment.chat({"X-Session-ID": "y" * 257})).status == 400
    assert [plan.session_id for plan in deployment.control.plans] == ["x" * 256, "header"]


async def test_headers_take_any_session_id_and_reason(deployment: Any) -> None:
    await deployment.start()
    deployment.control.reason = "zwei\nZeilen → ü"
    got = await deployment.chat(conversation_id="sitzung-ü\r\nX-Evil: 1")
    assert got.headers["x-kvtide-session"] == "sitzung-???X-Evil: 1"
    assert got.headers["x-kvtide-reason"] == "zwei?Zeilen ? ?"


async def test_unknown_words_in_our_headers_are_400(deployment: Any) -> None:
    await deployment.start()
    for header in ("X-Kvtide-Retention", "X-Kvtide-Strategy"):
        got = await deployment.chat({header: "maybe"})
        assert (got.status, got.error["param"]) == (400, header)


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_limit_is_413(deployment: Any, announced: bool) -> None:
    await deployment.start(max_body_bytes=1000)

    async def pieces() -> Any:
        for _ in range(11):
            yield b"x" * 100

    data: Any = b"x" * 1001 if announced else pieces()
    async with deployment.http.post(f"{deployment.url}/v1/completions", data=data) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (413, "request_too_large")


async def test_unknown_routes_and_methods_have_openai_bodies(deployment: Any) -> None:
    await deployment.start()
    missing = await deployment.get("/v1/nothing")
    assert (missing.status, missing.error["code"]) == (404, "not_found")
    assert set(missing.error) == {"message", "type", "param", "code"}
    wrong = await deployment.get("/v1/completions")
    assert (wrong.status, wrong.error["code"]) == (405, "method_not_allowed")
    assert await deployment.metric('kvtide_gateway_requests_total{route="other",status="404",strategy="none"}') == 1


async def test_no_known_key_is_401(locked: Any) -> None:
    for header in ("", "Bearer", "Bearer nope", "Basic ka", "ka"):
        got = await locked.chat({"authorization": header})
        assert (got.status, got.error["code"]) == (401, "invalid_api_key")
        assert (await locked.get("/v1/models", {"authorization": header})).status == 401
    assert not locked.control.plans


async def test_a_key_names_the_tenant_everywhere(locked: Any) -> None:
    for key in ("ka", "kb"):
        await locked.chat({"authorization": f"Bearer {key}"}, conversation_id="same")
    assert [m["x-kvtide-tenant"] for m in locked.control.metadata] == ["acme", "bolt"]
    assert [seen.directive.tenant for seen in locked.decode.seen] == ["acme", "bolt"]
    assert [plan.await_turn for plan in locked.control.plans] == [0, 0]


async def test_only_operators_force_a_strategy(locked: Any) -> None:
    got = await locked.chat({"authorization": "Bearer ka", "X-Kvtide-Strategy": "DECODE_ONLY"})
    assert (got.status, got.error["code"]) == (403, "not_allowed")
    got = await locked.chat({"authorization": "Bearer ko", "X-Kvtide-Strategy": "DECODE_ONLY"})
    assert got.headers["x-kvtide-strategy"] == "DECODE_ONLY"


async def test_without_a_key_file_everybody_forces_a_strategy_over_the_setting(deployment: Any) -> None:
    await deployment.start(force_strategy="DECODE_ONLY")
    got = await deployment.chat({"X-Kvtide-Strategy": "PREFILL_FRESH"})
    assert got.headers["x-kvtide-strategy"] == "PREFILL_FRESH"
