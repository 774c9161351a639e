"""HTTP to the engines."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Mapping
from enum import StrEnum
from typing import Any

import aiohttp

from kvtide_gateway.config import GatewaySettings

Headers = list[tuple[bytes, bytes]]
# Of one connection, or set by whoever sends: not passed from an engine's connection to a client's.
_OWN = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"date", b"server", b"x-request-id"))
# The engine's verdict on the request itself. Others (404, 429, …) are about P; then D has the word.
_REFUSALS = frozenset((400, 413, 415, 422))
_PIECEWISE = 2**18


class Leg(StrEnum):
    """Which engine a request went to."""

    PREFILL = "P"
    DECODE = "D"


class Cause(StrEnum):
    """Why a leg failed."""

    CONNECT = "connect"
    TIMEOUT = "timeout"
    BROKEN = "broken"
    STATUS = "status"
    MALFORMED = "malformed"
    NO_REFERENCE = "no_reference"

    @property
    def engine_is_gone(self) -> bool:
        """Whether another try on the same engine would meet the same end."""
        return self in (Cause.CONNECT, Cause.TIMEOUT)


class Answer:
    """An engine's answer, begun: status, headers, the first bytes, and the rest as they come."""

    def __init__(self, status: int, headers: Headers, first: bytes, rest: aiohttp.ClientResponse | None = None) -> None:
        self.status = status
        self.headers = headers
        self._first = first
        self._rest = rest

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, each piece as it arrived. Raises aiohttp.ClientError, TimeoutError when the engine breaks off."""
        if self._first:
            yield self._first
        while self._rest is not None and (chunk := await self._rest.content.readany()):
            yield chunk

    def close(self) -> None:
        """Ends the exchange; before the body's end it closes the connection, on which vLLM aborts the request."""
        if self._rest is not None:
            self._rest.close()


class LegFailed(Exception):
    """A leg failed before its answer began. ``answer`` is the engine's own, if it gave one."""

    def __init__(self, leg: Leg, cause: Cause, detail: str, answer: Answer | None = None) -> None:
        super().__init__(f"{leg}: {detail}")
        self.leg = leg
        self.cause = cause
        self.answer = answer


class Engines:
    """One client session for all engines. Cancelling a call closes its connection."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Must be made inside the event loop."""
        self._first_byte = settings.first_byte_timeout.total_seconds()
        self._answer = settings.answer_timeout.total_seconds()
        connect = settings.connect_timeout.total_seconds()
        idle = settings.idle_timeout.total_seconds()
        self._prefill_timeout = aiohttp.ClientTimeout(settings.prefill_timeout.total_seconds(), sock_connect=connect)
        self._stream_timeout = aiohttp.ClientTimeout(None, sock_connect=connect, sock_read=idle)
        self._whole_timeout = aiohttp.ClientTimeout(None, sock_connect=connect)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=settings.engine_keepalive.total_seconds()),
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding", "User-Agent"),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._session.close()

    async def prefill(self, url: str, body: bytes, headers: Mapping[str, str]) -> Any:
        """P's JSON, or the Answer with which it refuses the request. Raises LegFailed."""
        try:
            timeout = self._prefill_timeout
            async with self._session.post(
                url, data=_data(body), headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _failure(Leg.PREFILL, error) from error
        if response.status in _REFUSALS:
            return Answer(response.status, _passed(response), content)
        if response.status != 200:
            raise LegFailed(Leg.PREFILL, Cause.STATUS, f"status {response.status}")
        return _json(content)

    async def decode(self, url: str, body: bytes, headers: Mapping[str, str], streamed: bool) -> Answer:
        """D's answer from its first body bytes on; the caller closes it. Raises LegFailed."""
        try:
            async with asyncio.timeout(self._first_byte if streamed else self._answer):
                return await self._begin(url, body, headers, streamed)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _failure(Leg.DECODE, error) from error

    async def _begin(self, url: str, body: bytes, headers: Mapping[str, str], streamed: bool) -> Answer:
        timeout = self._stream_timeout if streamed else self._whole_timeout
        response = await self._session.post(
            url, data=_data(body), headers=headers, timeout=timeout, allow_redirects=False
        )
        try:
            if response.status >= 500:
                own = Answer(response.status, _passed(response), await response.read())
                raise LegFailed(Leg.DECODE, Cause.STATUS, f"status {response.status}", own)
            return Answer(response.status, _passed(response), await response.content.readany(), response)
        except BaseException:
            response.close()
            raise


def _data(body: bytes) -> bytes | io.BytesIO:
    """Large bodies are sent in pieces, between which other requests have their turn."""
    return body if len(body) <= _PIECEWISE else io.BytesIO(body)


def _passed(response: aiohttp.ClientResponse) -> Headers:
    lowered = ((name.lower(), value) for name, value in response.raw_headers)
    return [(name, value) for name, value in lowered if name not in _OWN]


def _failure(leg: Leg, error: Exception) -> LegFailed:
    if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
        return LegFailed(leg, Cause.TIMEOUT, "no answer in time")
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError | aiohttp.InvalidURL):
        return LegFailed(leg, Cause.CONNECT, "cannot be reached")
    return LegFailed(leg, Cause.BROKEN, f"broke off ({type(error).__name__})")


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise LegFailed(Leg.PREFILL, Cause.MALFORMED, "its answer is not JSON") from error
