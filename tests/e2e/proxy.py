"""A proxy in front of an engine, in which a test sees and changes what the gateway sends."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp import web

from kvtide_bench.local import free_port

Body = dict[str, Any]
Hook = Callable[[Body], Body]
_OF_ONE_CONNECTION = ("connection", "content-length", "host", "keep-alive", "transfer-encoding")


class Proxy:
    """Passes everything on, piece by piece, from a thread of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.target = ""
        self.seen: list[Body] = []
        """Every body that came, as it came."""
        self._hooks: list[Hook] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")

    def start(self) -> None:
        """Listens."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)

    def stop(self) -> None:
        """Ends the thread."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def on_next(self, hook: Hook) -> None:
        """``hook`` gets the next body and returns what the engine is sent; it may block."""
        self._hooks.append(hook)

    async def _open(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout(None), auto_decompress=False
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        raw = await self._hooked(await request.read())
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _OF_ONE_CONNECTION}
        try:
            async with self._session.request(
                request.method, self.target + request.path_qs, data=raw, headers=headers
            ) as answer:
                return await self._answer(request, answer)
        except aiohttp.ClientError:
            if request.transport is not None:
                request.transport.abort()
            raise

    async def _hooked(self, raw: bytes) -> bytes:
        try:
            body = json.loads(raw)
        except ValueError:
            return raw
        self.seen.append(body)
        if not self._hooks:
            return raw
        changed = await self._loop.run_in_executor(None, self._hooks.pop(0), body)
        return json.dumps(changed).encode()

    async def _answer(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in _OF_ONE_CONNECTION:
                response.headers.add(name, value)
        await response.prepare(request)
        async for piece in answer.content.iter_any():
            await response.write(piece)
        await response.write_eof()
        return response
