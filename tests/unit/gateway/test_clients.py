"""Streams in real time, clients that leave, engines that break off, many at once, OpenAI's own SDK."""

import asyncio
import json
from datetime import timedelta
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web


def paced(deployment: Any, gate: asyncio.Event) -> Any:
    """A stream that waits for ``gate`` after its first event."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(deployment.events[0])
        await gate.wait()
        for event in deployment.events[1:]:
            await response.write(event)
        return response

    return handle


def asking(deployment: Any, **fields: Any) -> Any:
    body = {"model": "tiny", "messages": [], "stream": True, "conversation_id": "s1", **fields}
    return deployment.http.post(f"{deployment.url}/v1/chat/completions", json=body)


async def test_each_chunk_comes_as_soon_as_d_sends_it(deployment: Any) -> None:
    await deployment.start()
    gate = asyncio.Event()
    deployment.decode.default = paced(deployment, gate)
    async with asking(deployment) as response:
        assert await response.content.readany() == deployment.events[0]
        gate.set()
        assert await response.content.read() == b"".join(deployment.events[1:])


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_client_that_leaves_before_the_answer_ends_the_leg_under_way(deployment: Any, leg: str) -> None:
    await deployment.start()
    engine = getattr(deployment, leg)
    engine.default = engine.hang
    task = asyncio.create_task(deployment.chat(conversation_id="s1"))
    await engine.reached.wait()
    task.cancel()
    await asyncio.wait_for(engine.cancelled.wait(), 5)
    assert await deployment.metric("kvtide_gateway_cancelled_total") == 1
    assert await deployment.metric("kvtide_gateway_open_requests") == 1  # that of the metrics themselves
    assert deployment.control.records == []


async def test_a_client_that_leaves_while_the_plan_is_made_reaches_no_engine(deployment: Any) -> None:
    await deployment.start(plan_timeout=timedelta(minutes=1))
    deployment.control.hold_plans = asyncio.Event()
    task = asyncio.create_task(deployment.chat())
    await deployment.control.planning.wait()
    task.cancel()
    while not await deployment.metric("kvtide_gateway_cancelled_total"):
        pass
    deployment.control.hold_plans.set()
    assert not deployment.prefill.seen


async def test_a_client_that_leaves_mid_stream_ends_d_s_request(deployment: Any) -> None:
    await deployment.start()
    deployment.decode.default = paced(deployment, asyncio.Event())
    async with asking(deployment) as response:
        await response.content.readany()
    await asyncio.wait_for(deployment.decode.cancelled.wait(), 5)
    assert await deployment.metric("kvtide_gateway_cancelled_total") == 1
    assert deployment.control.records == []


async def test_a_client_that_leaves_at_done_has_had_its_turn(deployment: Any) -> None:
    await deployment.start()

    async def lingering(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(deployment.events[2])
        await asyncio.Event().wait()
        return response

    deployment.decode.default = lingering
    async with asking(deployment) as response:
        await response.content.readany()
    await deployment.control.recorded.wait()
    await asyncio.wait_for(deployment.decode.cancelled.wait(), 5)
    assert await deployment.metric("kvtide_gateway_cancelled_total") == 0


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_d_that_breaks_off_breaks_the_clients_answer_too(deployment: Any, streamed: bool) -> None:
    await deployment.start()

    async def breaking(request: web.Request) -> web.StreamResponse:
        headers = {"content-type": "text/event-stream"} if streamed else {"content-length": "100"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        assert request.transport is not None
        request.transport.close()
        return response

    deployment.decode.default = breaking
    async with asking(deployment) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    assert await deployment.metric("kvtide_gateway_broken_streams_total") == 1
    assert deployment.control.records == []


async def test_two_turns_of_one_session_at_once_do_not_wait_for_each_other(deployment: Any) -> None:
    await deployment.start()
    gate = asyncio.Event()
    deployment.decode.script = [paced(deployment, gate)]
    async with asking(deployment) as first:
        second = await deployment.chat(conversation_id="s1")
        assert second.raw == deployment.whole
        gate.set()
        assert await first.content.read() == b"".join(deployment.events)
    attempts = {seen.directive.attempt_id for seen in deployment.decode.seen}
    assert len(attempts) == 2


async def test_a_hundred_at_once_each_get_their_own(deployment: Any) -> None:
    await deployment.start()

    async def echo(request: web.Request) -> web.StreamResponse:
        return web.json_response((await request.json())["messages"])

    deployment.decode.default = echo
    got = await asyncio.gather(*(deployment.chat(messages=[n], conversation_id=f"s{n % 7}") for n in range(100)))
    assert [answer.body for answer in got] == [[n] for n in range(100)]


async def test_openais_sdk_streams(deployment: Any) -> None:
    await deployment.start()
    async with openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="any", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True, extra_body={"conversation_id": "s"}
        )
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello"
    await deployment.control.recorded.wait()
    assert await deployment.metric("kvtide_gateway_cancelled_total") == 0


async def test_openais_sdk_whole_answers_models_and_errors(deployment: Any) -> None:
    await deployment.start()
    async with openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="any", max_retries=0) as client:
        answer = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content == "Hello"
        assert [model.id async for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError, match="no such model"):
            await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "hi"}])


async def test_engines_get_no_headers_of_the_client_and_no_offer_to_compress(deployment: Any) -> None:
    await deployment.start()
    await deployment.post(
        "/v1/completions",
        json.dumps({"model": "tiny", "prompt": "hi"}).encode(),
        {"authorization": "Bearer secret", "cookie": "a=b", "accept-encoding": "gzip"},
    )
    sent = {name.lower() for name in deployment.decode.seen[0].headers}
    assert sent == {"host", "accept", "content-type", "content-length", "x-request-id"}
