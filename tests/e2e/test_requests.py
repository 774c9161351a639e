"""Requests as clients send them: streams, retention, and what an engine refuses."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvtide_bench.scrape import read
from tests.e2e.world import (
    OPERATOR,
    PREFILL_LEASE,
    SERVED,
    TOKENS,
    Counters,
    World,
    question,
    reusable,
    said,
    user,
    wait_until,
)

pytestmark = pytest.mark.engine
KEY = {"authorization": f"Bearer {OPERATOR}"}


@pytest.fixture
def gateway(world: World) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{world.deployment.url}/v1", api_key=OPERATOR, max_retries=0) as client:
        yield client


@pytest.fixture
def plain(world: World) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{world.plain.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_streamed_answer_equals_the_whole_one_and_a_plain_vllms(
    world: World, gateway: openai.OpenAI, plain: openai.OpenAI
) -> None:
    messages, last = world.grown("streamed")
    asked: dict[str, Any] = {"model": SERVED, "max_tokens": TOKENS, "temperature": 0}
    asked["messages"] = [*messages, user("And now?")]
    own = {"extra_body": {"conversation_id": "streamed"}}
    create = gateway.chat.completions.with_raw_response.create
    streamed = create(**asked, **own, stream=True, stream_options={"include_usage": True})
    with streamed.parse() as stream:
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = create(**asked, **own)
    right = plain.chat.completions.create(**asked)
    assert text == whole.parse().choices[0].message.content == right.choices[0].message.content
    assert chunks[-1].usage is not None and right.usage is not None
    assert chunks[-1].usage.completion_tokens == right.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == right.usage.prompt_tokens
    for response in (streamed, whole):
        assert response.headers["x-kvtide-strategy"] == "PREFILL_REUSE", response.headers["x-kvtide-reason"]
        assert response.headers["x-kvtide-session"] == "streamed"
        assert int(response.headers["x-kvtide-reused-tokens"]) >= reusable(world.tokens(asked["messages"]), last) > 0
        assert response.headers["x-kvtide-reason"] and response.headers["x-kvtide-timing"]


def malformed(world: World) -> bytes:
    return b'{"model": "smollm2", "messages": ['


def unknown_model(world: World) -> dict[str, Any]:
    return world.body([user("Hello")], model="no-such-model")


def too_many_tokens(world: World) -> dict[str, Any]:
    return world.body([question("limits", 1)], max_tokens=100_000)


def too_long(world: World) -> dict[str, Any]:
    return world.body([user("The water rises and falls. " * 1200)])


@pytest.mark.parametrize("bad", [malformed, unknown_model, too_many_tokens, too_long])
def test_what_an_engine_refuses_is_refused_in_its_own_words_and_holds_nothing(world: World, bad: Any) -> None:
    free = {engine.spec.name: world.free_blocks(engine) for engine in (world.prefill, world.decode)}
    counters, sent = Counters(world.decode), bad(world)
    if isinstance(sent, dict):
        sent = sent | {"conversation_id": f"bad-{bad.__name__}"}
    got, right = (refused(world, url, sent) for url in (world.deployment.url, world.plain.url))
    assert got.status_code == right.status_code >= 400
    mine, theirs = got.json()["error"], right.json()["error"]
    assert {key: mine[key] for key in ("type", "code", "param")} == {
        key: theirs[key] for key in ("type", "code", "param")
    }
    assert mine["message"]
    assert world.free_blocks(world.decode) >= free["decode-0"]
    assert counters.of("kvtide:leases_granted_total") == 0
    wait_until(lambda: stepped_free(world) >= free["prefill-0"], PREFILL_LEASE + 5, "P kept nothing longer")


def refused(world: World, url: str, sent: bytes | dict[str, Any]) -> Any:
    if isinstance(sent, dict):
        return world.post(url, sent, KEY)
    headers = KEY | {"content-type": "application/json"}
    return world.http.post(f"{url}/v1/chat/completions", content=sent, headers=headers)


def stepped_free(world: World) -> int:
    """P frees at a step, so it is given one."""
    world.fill(world.prefill, 4)
    return world.free_blocks(world.prefill)


def test_a_request_without_retention_holds_nothing(world: World) -> None:
    world.empty_decode()
    free, counters = world.free_blocks(world.decode), Counters(world.decode)
    asked = [question("retention", 1)]
    answer = world.ask_right("unkept", asked, headers={"x-kvtide-retention": "none"})
    assert (world.held_tokens(world.decode), world.free_blocks(world.decode)) == (0, free)
    assert read(world.decode.url)["vllm:kv_cache_usage_perc"] == 0
    assert counters.of("kvtide:leases_granted_total") == 0
    later = world.ask_right("unkept", [*asked, said(answer.text), user("And now?")])
    assert (later.strategy, later.reused) == ("PREFILL_FRESH", 0)
    assert world.held_tokens(world.decode) == len(later.held) // 32 * 32, "the default is to hold"
    assert world.free_blocks(world.decode) == free - len(later.held) // 32


def test_a_decode_engine_that_holds_and_idles_uses_little_of_a_core(world: World) -> None:
    world.grown("idle")
    assert world.held_tokens(world.decode) > 0
    seconds = 4.0
    before = cpu_seconds(world.decode.process.pid)
    time.sleep(seconds)  # the time over which use is measured
    assert cpu_seconds(world.decode.process.pid) - before < 0.1 * seconds


def cpu_seconds(session: int) -> float:
    """What all processes of a session have used."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
