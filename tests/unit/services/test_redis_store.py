"""What only the Redis store can meet: a server that is away, silent or emptied."""

import asyncio
import socket
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
import redis.asyncio as redis

from kvtide_services.errors import InvalidToken, StoreUnavailable
from kvtide_services.store import FIRST_TOKEN, SessionRecord
from kvtide_services.store.redis import RedisStore

SPAN = timedelta(seconds=100)
RECORD = SessionRecord("acme", "s1", SPAN, SPAN, timedelta(0))


def store_of(url: str, timeout: float = 5) -> RedisStore:
    return RedisStore(url, timedelta(seconds=timeout), 4, 100, 4)


@pytest.fixture
async def client(valkey_url: str) -> AsyncIterator[Any]:
    made = redis.from_url(valkey_url)
    await made.flushall()
    yield made
    await made.aclose()


@pytest.fixture
async def store(valkey_url: str, client: Any) -> AsyncIterator[RedisStore]:
    made = store_of(valkey_url)
    yield made
    await made.aclose()


async def use_everything(store: RedisStore) -> None:
    """Every operation says that the store does not answer."""
    none = timedelta(0)
    for operation in (
        store.engines(),
        store.incarnation(),
        store.begin("i"),
        store.drop_engine("d"),
        store.held("t", "s"),
        store.create(RECORD),
        store.get("t", "s"),
        store.page("t", "", 1),
        store.close("t", "s"),
        store.renew("t", ["s"], None),
        store.lapse(),
        store.last_token("t"),
        store.events("t", FIRST_TOKEN, none),
    ):
        with pytest.raises(StoreUnavailable):
            await operation


async def test_without_a_server_every_operation_says_so() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        store = store_of(f"redis://127.0.0.1:{reserved.getsockname()[1]}/0")
        await use_everything(store)
        await store.aclose()


async def test_a_server_that_never_answers_costs_the_timeout_and_no_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = store_of(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", timeout=0.05)
        started = asyncio.get_running_loop().time()
        await use_everything(store)
        assert asyncio.get_running_loop().time() - started < 13 * 0.05 + 2
        await store.aclose()


async def test_a_connection_that_the_server_closed_is_replaced_unnoticed(store: RedisStore, client: Any) -> None:
    await store.create(RECORD)
    await client.client_kill_filter(_type="normal", skipme=True)
    assert await store.get("acme", "s1") is not None


async def test_no_cancellation_is_lost(store: RedisStore) -> None:
    async def work() -> None:
        while not (task := asyncio.current_task()) or not task.cancelling():
            await store.get("acme", "s1")

    for steps in range(1, 100):
        working = asyncio.create_task(work())
        for _ in range(steps):
            await asyncio.sleep(0)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        assert working.cancelled()


async def test_more_operations_than_connections_wait_for_one(store: RedisStore) -> None:
    assert await asyncio.gather(*(store.get("acme", "s1") for _ in range(200))) == [None] * 200


async def test_a_watch_of_an_emptied_store_has_to_list_again(store: RedisStore, client: Any) -> None:
    await store.create(RECORD)
    token = await store.last_token("acme")
    waiting = asyncio.create_task(store.events("acme", token, timedelta(seconds=30)))
    while not (await client.info("clients"))["blocked_clients"]:  # noqa: ASYNC110  # the server tells nobody
        await asyncio.sleep(0.01)
    await client.flushall()
    await store.create(RECORD)
    with pytest.raises(InvalidToken):
        await waiting
    with pytest.raises(InvalidToken):
        await store.events("acme", token, timedelta(0))


async def test_the_server_may_have_lost_its_scripts(store: RedisStore, client: Any) -> None:
    await store.create(RECORD)
    await client.script_flush()
    assert (await store.renew("acme", ["s1"], SPAN))[0] is not None


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="scheme"):
        store_of("nonsense")
