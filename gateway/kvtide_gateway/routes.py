"""Which endpoint serves which path, and what every endpoint shares: methods, errors, counting."""

import logging
from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from kvtide_gateway.asgi import ClientGone, StreamBroken, respond
from kvtide_gateway.errors import GatewayError, InternalError, MethodNotAllowed, NoSuchRoute, render
from kvtide_gateway.metrics import Metrics

logger = logging.getLogger(__name__)


class Routes:
    """An ASGI application of endpoints by path; errors become OpenAI bodies."""

    def __init__(self, endpoints: Mapping[str, tuple[str, ASGIApp]], metrics: Metrics, retry_after: float) -> None:
        """``endpoints``: path → method and endpoint. ``retry_after``: seconds that a 503 asks clients to wait."""
        self._endpoints = endpoints
        self._metrics = metrics
        self._retry_after = str(round(retry_after)).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._metrics.opened()
        try:
            await self._endpoint(scope)(scope, receive, send)
        except GatewayError as error:
            await self._fail(scope, send, error)
        except ClientGone:
            self._metrics.client_gone()
        except StreamBroken as error:
            # Returning with the response unfinished makes the server close the connection: the client sees an error.
            self._metrics.stream_broken()
            logger.warning("An engine broke off its answer: %s", error)
        except Exception:
            logger.exception("A request failed")
            await self._fail(scope, send, InternalError("the gateway failed; its log says how"))
        finally:
            self._metrics.closed()

    def _endpoint(self, scope: Scope) -> ASGIApp:
        method, endpoint = self._endpoints.get(scope["path"], ("", None))
        if endpoint is None:
            raise NoSuchRoute(f"no route {scope['method']} {scope['path']}")
        if scope["method"] != method:
            raise MethodNotAllowed(f"{scope['path']} takes {method}, not {scope['method']}")
        return endpoint

    async def _fail(self, scope: Scope, send: Send, error: GatewayError) -> None:
        status, body = render(error)
        route = scope["path"] if scope["path"] in self._endpoints else "other"
        self._metrics.answered(route, error.strategy, status)
        headers = [(b"retry-after", self._retry_after)] if status == 503 else []
        await respond(send, status, body, b"application/json", headers + error.headers)
