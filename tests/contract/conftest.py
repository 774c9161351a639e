"""The real services over a real Valkey, engines that are only their links, and clients."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis.asyncio as redis
from google.rpc import error_details_pb2, status_pb2

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide.lease.v1 import lease_pb2_grpc
from kvtide.routing.v1 import routing_pb2, routing_pb2_grpc
from kvtide.session.v1 import session_pb2_grpc
from kvtide_services.app import App
from kvtide_services.config import ServeSettings

# An engine counts as gone after three beats; a loaded machine may well pause a test for one.
BEAT = 0.6
PATIENCE = 10.0


class Client:
    """Calls of one caller."""

    def __init__(self, channel: grpc.aio.Channel, metadata: dict[str, str]) -> None:
        self.channel = channel
        self.metadata = list(metadata.items())
        self.leases: Any = lease_pb2_grpc.LeaseServiceStub(channel)
        self.sessions: Any = session_pb2_grpc.SessionServiceStub(channel)
        self.routing: Any = routing_pb2_grpc.RoutingServiceStub(channel)

    async def call(self, method: Any, request: Any) -> Any:
        return await method(request, metadata=self.metadata, timeout=PATIENCE)

    async def plan(self, **fields: Any) -> Any:
        request = routing_pb2.PlanRequest(**({"model": "m", "session_id": "s1"} | fields))
        return await self.call(self.routing.Plan, request)

    async def engines(self) -> list[str]:
        found = await self.call(self.leases.ListEngines, pb.ListEnginesRequest())
        return [status.engine.name for status in found.engines]


class Link:
    """An engine, as far as the lease service sees it; beats by itself."""

    def __init__(self, client: Client, hello: pb.Hello) -> None:
        self.engine = hello.engine
        self._client = client
        self._hello = hello
        self._call: Any = None
        self._beating: asyncio.Task[None] | None = None

    async def open(self) -> pb.Welcome:
        self._call = self._client.leases.Attach(metadata=self._client.metadata)
        await self._call.write(pb.AttachRequest(hello=self._hello))
        welcome: pb.Welcome = (await self.read()).welcome
        self._beating = asyncio.create_task(self._beat(welcome.beat_interval.ToTimedelta().total_seconds()))
        return welcome

    async def send(self, **message: Any) -> None:
        await self._call.write(pb.AttachRequest(**message))

    async def read(self) -> Any:
        """The next message; grpc.aio.EOF at the end of the stream."""
        async with asyncio.timeout(PATIENCE):
            return await self._call.read()

    async def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        if self._call is not None:
            self._call.cancel()

    async def _beat(self, interval: float) -> None:
        stamp = 1000
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                stamp += 1
                await self.send(beat=pb.Beat(clock_stamp=stamp, free_blocks=10))
                await asyncio.sleep(interval)


class Services:
    """All services behind one port, startable again on it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._app: App | None = None
        self._stack = contextlib.AsyncExitStack()
        self.port = 0

    async def start(self, **settings: Any) -> None:
        self._settings |= settings
        self._app = App(ServeSettings(**self._settings, port=self.port))
        await self._app.start()
        self.port = self._app.port

    async def stop(self) -> None:
        if self._app is not None:
            await self._app.stop()
            self._app = None

    async def close(self) -> None:
        await self._stack.aclose()
        await self.stop()

    def client(self, tenant: str = "acme", key: str = "") -> Client:
        options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100)]
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options)
        self._stack.push_async_callback(channel.close)
        metadata = {"x-kvtide-tenant": tenant} if tenant else {}
        return Client(channel, metadata | ({"authorization": f"Bearer {key}"} if key else {}))

    async def attach(self, name: str = "decode-0", *leases: pb.Lease, key: str = "", **fields: Any) -> Link:
        role = pb.ENGINE_ROLE_PREFILL if name.startswith("prefill") else pb.ENGINE_ROLE_DECODE
        known = {"boot_id": f"{name}-1", "role": role, "model": "m", "http_url": f"http://{name}"}
        engine = pb.Engine(name=name, **(known | {"block_size": 32, "pairing_digest": "x"} | fields))
        link = Link(self.client("", key), pb.Hello(protocol_version=1, engine=engine, leases=leases))
        self._stack.push_async_callback(link.close)
        await link.open()
        await self._published(engine)
        return link

    async def _published(self, engine: pb.Engine) -> None:
        """Plans see an engine once the store has it, a moment after its welcome."""
        async with redis.from_url(self._settings["store_url"], protocol=2) as store, asyncio.timeout(PATIENCE):
            while True:
                record = await store.get(f"kvtide:engine:{engine.name}")
                if record and pb.EngineStatus.FromString(record).engine == engine:
                    return
                await asyncio.sleep(0.01)


@pytest.fixture
async def valkey(valkey_url: str) -> AsyncIterator[Any]:
    """A client of the store, which is empty."""
    client = redis.from_url(valkey_url, protocol=2)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def settings(valkey_url: str) -> dict[str, Any]:
    spans = {"beat_interval": BEAT, "store_timeout": 0.8, "engines_max_age": 0, "watch_checkpoint": 0.3, "grace": 0.2}
    return {"store_url": valkey_url} | {name: timedelta(seconds=span) for name, span in spans.items()}


@pytest.fixture
async def services(valkey: Any, settings: dict[str, Any]) -> AsyncIterator[Services]:
    made = Services(settings)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def guarded(valkey: Any, settings: dict[str, Any], tmp_path: Path) -> AsyncIterator[Services]:
    """The same with API keys."""
    rows = [("ka", "acme", "client"), ("kb", "beta", "client"), ("ko", "ops", "operator")]
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"key": k, "tenant": t, "role": r} for k, t, r in rows]}))
    made = Services(settings)
    await made.start(api_keys_file=str(path))
    yield made
    await made.close()


@pytest.fixture
def client(services: Services) -> Client:
    return services.client()


@pytest.fixture
def lease() -> Callable[..., pb.Lease]:
    def make(lease_id: str = "l1", **fields: Any) -> pb.Lease:
        known = {"epoch": 1, "tenant": "acme", "session_id": "s1", "turn": 1, "num_tokens": 640}
        made = pb.Lease(lease_id=lease_id, **(known | fields))
        made.ttl.FromTimedelta(timedelta(seconds=100))
        return made

    return make


@pytest.fixture
def eventually() -> Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]:
    """Asks until the answer is true, and returns it; for what another process publishes."""

    async def wait(ask: Callable[[], Awaitable[Any]], within: float = PATIENCE) -> Any:
        async with asyncio.timeout(within):
            while not (answer := await ask()):  # noqa: ASYNC110  # another process publishes it
                await asyncio.sleep(0.01)
            return answer

    return wait


@pytest.fixture
def failure() -> Callable[[Awaitable[Any]], Awaitable[tuple[str, str, dict[str, str]]]]:
    """The code, reason and metadata with which a call fails."""

    async def fail(call: Awaitable[Any]) -> tuple[str, str, dict[str, str]]:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call
        error = raised.value
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin" and isinstance(value, bytes):
                info = error_details_pb2.ErrorInfo()
                assert status_pb2.Status.FromString(value).details[0].Unpack(info)
                assert info.domain == "kvtide"
                return error.code().name, info.reason, dict(info.metadata)
        raise AssertionError(f"no details: {error.code()} {error.details()}")

    return fail


@pytest.fixture
def age(valkey: Any) -> Callable[[float], Awaitable[None]]:
    """Lets time pass for sessions: shortens every TTL and deadline by as many seconds."""

    async def advance(seconds: float) -> None:
        for key in await valkey.keys("kvtide:{*"):
            left = await valkey.pttl(key)
            if left >= 0:
                await valkey.pexpire(key, max(0, left - round(1000 * seconds)))
            if key.endswith(b":sessions"):
                for member, score in await valkey.zrange(key, 0, -1, withscores=True):
                    await valkey.zadd(key, {member: score - 1000 * seconds})

    return advance
