"""The services as processes: together, each alone, and how they end."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from kvtide.lease.v1 import lease_pb2
from kvtide.session.v1 import session_pb2

START = "from kvtide.cli import main; main()"
Serve = Callable[..., Awaitable["Process"]]


class Process:
    """One ``kvtide serve``."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child
        self.port = 0

    async def ready(self) -> None:
        """Until it says which port it took."""
        assert self.child.stderr is not None
        async with asyncio.timeout(20):
            while b"Serving" not in (line := await self.child.stderr.readline()):
                assert line, "it ended while starting"
        self.port = int(line.rpartition(b":")[2])

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> float:
        """How long it took to end."""
        started = asyncio.get_running_loop().time()
        self.child.send_signal(number)
        await asyncio.wait_for(self.child.communicate(), 20)
        return asyncio.get_running_loop().time() - started

    async def kill(self) -> None:
        if self.child.returncode is None:
            self.child.kill()
            await self.child.communicate()


@pytest.fixture
async def serve(valkey: Any, valkey_url: str) -> AsyncIterator[Serve]:
    """Starts services as processes; none outlives the test."""
    made: list[Process] = []

    async def start(name: str, *args: str) -> Process:
        argv = ["-c", START, "serve", name, "--port", "0", "--store-url", valkey_url, *args]
        child = await asyncio.create_subprocess_exec(sys.executable, *argv, stderr=asyncio.subprocess.PIPE)
        process = Process(child)
        made.append(process)
        await process.ready()
        return process

    yield start
    for process in made:
        await process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_ends_soon_with_links_and_streams_open(services: Any, serve: Serve, number: signal.Signals) -> None:
    process = await serve("all")
    services.port = process.port
    client = services.client()
    link = await services.attach()
    watch = client.sessions.WatchSessions(session_pb2.WatchSessionsRequest(), metadata=client.metadata)
    keeping = client.sessions.KeepAlive(metadata=client.metadata)
    await keeping.write(session_pb2.KeepAliveRequest(session_ids=["s1"]))
    await keeping.read()
    assert await process.stop(number) < 4
    assert process.child.returncode == 0
    assert await link.read() is grpc.aio.EOF
    watch.cancel()
    keeping.cancel()


async def test_each_service_alone_and_a_close_that_crosses_them(
    services: Any, serve: Serve, lease: Any, eventually: Any
) -> None:
    leases, routing = await asyncio.gather(serve("lease"), serve("routing"))
    sessions = await serve("session", "--lease-address", f"127.0.0.1:{leases.port}")
    services.port = leases.port
    link = await services.attach("decode-0", lease())
    services.port = routing.port
    router = services.client()

    async def planned() -> bool:
        try:
            return bool((await router.plan()).decode.engine.name == "decode-0")
        except grpc.aio.AioRpcError:
            return False

    assert await eventually(planned)
    services.port = sessions.port
    client = services.client()
    request = session_pb2.CreateSessionRequest(session_id="s1", ttl=Duration(seconds=100))
    await client.call(client.sessions.CreateSession, request)
    await client.call(client.sessions.CloseSession, session_pb2.CloseSessionRequest(session_id="s1"))
    assert (await link.read()).release == lease_pb2.LeaseRelease(lease_id="l1", epoch=1)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await client.plan()
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--store-url", "nonsense"], b"scheme"),
        (["--api-keys-file", "/nonexistent"], b"No such file"),
        (["--idle-ttl", "4000"], b"idle_ttl must not exceed"),
    ],
)
async def test_settings_that_cannot_work_end_it_with_words(args: list[str], words: bytes) -> None:
    argv = ["-c", START, "serve", "all", "--port", "0", *args]
    child = await asyncio.create_subprocess_exec(sys.executable, *argv, stderr=asyncio.subprocess.PIPE)
    _, said = await asyncio.wait_for(child.communicate(), 20)
    assert child.returncode != 0
    assert words in said and b"Traceback" not in said


async def test_a_port_that_is_taken_ends_it_with_words(services: Any) -> None:
    argv = ["-c", START, "serve", "all", "--port", str(services.port)]
    child = await asyncio.create_subprocess_exec(sys.executable, *argv, stderr=asyncio.subprocess.PIPE)
    _, said = await asyncio.wait_for(child.communicate(), 20)
    assert child.returncode != 0
    assert b"bind" in said and b"Traceback" not in said
