"""Builds the gateway from its settings: the one place that knows every part."""

import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from importlib import metadata

from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from kvtide_gateway.about import About
from kvtide_gateway.auth import KeyRing
from kvtide_gateway.completions import Completions
from kvtide_gateway.config import GatewaySettings
from kvtide_gateway.known import KnownEngines
from kvtide_gateway.legs import Engines
from kvtide_gateway.metrics import Metrics
from kvtide_gateway.params import Signer
from kvtide_gateway.plans import ControlPlane, Planner, channel
from kvtide_gateway.routes import Routes
from kvtide_gateway.turn import TurnRunner
from kvtide_gateway.turns import EndedTurn, RecentTurns, TurnReporter

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Gateway:
    """Everything behind the port; made inside the event loop."""

    def __init__(self, settings: GatewaySettings, keys: KeyRing, key: bytes, metrics: Metrics) -> None:
        backoff = settings.reconnect_backoff.total_seconds()
        routing = channel(settings.routing_address, backoff)
        sessions = channel(settings.session_address, backoff)
        self._channels = (routing, sessions)
        services = ControlPlane(
            routing,
            sessions,
            settings.service_api_key,
            settings.plan_timeout.total_seconds(),
            settings.record_timeout.total_seconds(),
        )
        self._recent = RecentTurns(settings.remembered_sessions, settings.await_window.total_seconds(), time.monotonic)
        self._reporter = TurnReporter(services.record, settings.max_pending_records, metrics.reported)
        self._engines = Engines(settings)
        planner = Planner(services, KnownEngines(settings.remembered_engines), self._recent)
        self.routes = self._routes(settings, keys, key, planner, metrics)

    def _routes(
        self, settings: GatewaySettings, keys: KeyRing, key: bytes, planner: Planner, metrics: Metrics
    ) -> ASGIApp:
        runner = TurnRunner(planner, self._engines, Signer(key), time.perf_counter, _new_id, settings.max_attempts)
        completions = Completions(settings, keys, planner, self._engines, runner, self._ended, metrics)
        about = About(keys, planner, metrics, _release(), int(time.time()))
        endpoints: dict[str, tuple[str, ASGIApp]] = {
            CHAT: ("POST", completions),
            COMPLETIONS: ("POST", completions),
            "/v1/models": ("GET", about.models),
            "/version": ("GET", about.version),
            "/health": ("GET", about.health),
            "/metrics": ("GET", about.metrics),
        }
        return Routes(endpoints, metrics, settings.retry_after.total_seconds())

    def _ended(self, turn: EndedTurn) -> None:
        self._recent.ended(turn.tenant, turn.session_id, turn.turn)
        self._reporter.report(turn)

    async def aclose(self) -> None:
        """Ends reports, engine connections and channels."""
        await self._reporter.aclose()
        await self._engines.aclose()
        for each in self._channels:
            await each.close()


def build(settings: GatewaySettings) -> ASGIApp:
    """The ASGI application. Raises OSError, ValueError for key files that cannot be read."""
    keys, key, metrics = KeyRing.from_file(settings.api_keys_file), settings.shared_key(), Metrics()

    @contextlib.asynccontextmanager
    async def lifespan(app: Router) -> AsyncIterator[dict[str, Gateway]]:
        gateway = Gateway(settings, keys, key, metrics)
        yield {"gateway": gateway}
        await gateway.aclose()

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await scope["state"]["gateway"].routes(scope, receive, send)

    return Router(default=serve, lifespan=lifespan)


def _new_id() -> str:
    return uuid.uuid4().hex


def _release() -> str:
    try:
        return metadata.version("kvtide-gateway")
    except metadata.PackageNotFoundError:
        return "unknown"
