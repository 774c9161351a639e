"""What the routes need of ASGI: bodies within a limit, vanished clients, whole responses."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from kvtide_gateway.errors import TooLarge

T = TypeVar("T")
Headers = list[tuple[bytes, bytes]]


class ClientGone(Exception):
    """The client closed its connection."""


class StreamBroken(Exception):
    """An engine broke off its answer after the client had got its beginning."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body. Raises TooLarge, ClientGone."""
    if _announced(scope) > limit:
        raise TooLarge(f"the body is larger than {limit} bytes")
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise TooLarge(f"the body is larger than {limit} bytes")
        more = message.get("more_body", False)
    return b"".join(parts)


def _announced(scope: Scope) -> int:
    length = dict(scope["headers"]).get(b"content-length", b"0")
    return int(length) if length.isdigit() else 0


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away first. Raises ClientGone."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(send: Send, status: int, body: bytes, content_type: bytes, headers: Headers | None = None) -> None:
    """Sends a whole response."""
    own = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": own + (headers or [])})
    await send({"type": "http.response.body", "body": body})


def header_text(text: str) -> bytes:
    """One line of ASCII, for a header's value."""
    return "".join(c if " " <= c <= "~" else "?" for c in text).strip().encode("ascii")
