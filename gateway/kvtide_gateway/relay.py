"""An engine's bytes to the client, as they come."""

from collections.abc import Callable

import aiohttp
from starlette.types import Send

from kvtide_gateway.asgi import Headers, StreamBroken
from kvtide_gateway.legs import Answer

_DONE = b"data: [DONE]"


class _End:
    """Notices the end of an answer before its last bytes are sent on: the client may act on them at once."""

    def __init__(self, answer: Answer, ended: Callable[[], None]) -> None:
        length = dict(answer.headers).get(b"content-length", b"")
        self._left = int(length) if length.isdigit() else None
        self._ended = ended
        self.reached = False

    def see(self, chunk: bytes) -> None:
        if self._left is not None:
            self._left -= len(chunk)
        if self._left == 0 or _DONE in chunk:
            self.reach()

    def reach(self) -> None:
        if not self.reached:
            self.reached = True
            self._ended()


async def relay(send: Send, answer: Answer, headers: Headers, ended: Callable[[], None]) -> None:
    """Sends the answer with ``headers`` added and closes it. ``ended`` is called once, when it is whole.

    Raises StreamBroken when the engine breaks off, with the response left unfinished.
    """
    end = _End(answer, ended)
    try:
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers + headers})
        async for chunk in answer.chunks():
            end.see(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        end.reach()
        await send({"type": "http.response.body", "body": b""})
    except (aiohttp.ClientError, TimeoutError) as error:
        raise StreamBroken(str(error)) from error
    finally:
        answer.close()
