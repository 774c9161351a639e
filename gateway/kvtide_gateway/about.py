"""/v1/models, /version, /health and /metrics."""

import json
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from kvtide_gateway.asgi import respond
from kvtide_gateway.auth import KeyRing
from kvtide_gateway.errors import ControlPlaneAway
from kvtide_gateway.metrics import CONTENT_TYPE, Metrics
from kvtide_gateway.plans import Planner


class About:
    """Endpoints that say what the gateway serves and how it is."""

    def __init__(self, keys: KeyRing, planner: Planner, metrics: Metrics, release: str, started: int) -> None:
        """``started``: Unix time in seconds, which OpenAI's model list wants of each model."""
        self._keys = keys
        self._planner = planner
        self._metrics = metrics
        self._release = release
        self._started = started

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        """OpenAI's list of models; those of earlier plans while routing is away."""
        self._keys.caller(Headers(scope=scope).get("authorization", ""))
        names = await self._models()
        rows = [{"id": n, "object": "model", "created": self._started, "owned_by": "kvtide"} for n in names]
        await _json(send, 200, {"object": "list", "data": rows})

    async def _models(self) -> list[str]:
        try:
            return await self._planner.models()
        except ControlPlaneAway:
            known = self._planner.known_models()
            if not known:
                raise
            return known

    async def version(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The gateway's own release."""
        await _json(send, 200, {"version": self._release})

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """200 when routing answers and a decode engine is attached."""
        try:
            reason = "" if await self._planner.models() else "no decode engine is attached"
        except ControlPlaneAway as error:
            reason = str(error)
        body = {"status": "unavailable", "reason": reason} if reason else {"status": "ok"}
        await _json(send, 503 if reason else 200, body)

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """For Prometheus."""
        await respond(send, 200, self._metrics.render(), CONTENT_TYPE)


async def _json(send: Send, status: int, body: dict[str, Any]) -> None:
    await respond(send, status, json.dumps(body).encode(), b"application/json")
