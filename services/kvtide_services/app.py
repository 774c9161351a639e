"""Builds the services from their settings: the one place that knows every part."""

import asyncio
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from kvtide.lease.v1 import lease_pb2_grpc
from kvtide.routing.v1 import routing_pb2_grpc
from kvtide.session.v1 import session_pb2_grpc
from kvtide_services.auth import KeyRing
from kvtide_services.config import ServeSettings
from kvtide_services.lease.mirror import Mirror
from kvtide_services.lease.publisher import Publisher
from kvtide_services.lease.relay import LocalRelay
from kvtide_services.lease.service import Registry, expire_forever
from kvtide_services.lease.servicer import LeaseServicer
from kvtide_services.metrics import Metrics, MetricsServer
from kvtide_services.routing.directory import EngineDirectory
from kvtide_services.routing.router import Patience, Policy, Router
from kvtide_services.routing.servicer import RoutingServicer
from kvtide_services.session.keeper import LeaseReleaser, SessionKeeper, Terms
from kvtide_services.session.releaser import RemoteReleaser, release_nothing
from kvtide_services.session.servicer import SessionServicer
from kvtide_services.session.sweeper import sweep_forever
from kvtide_services.store.redis import RedisStore
from kvtide_services.transport.server import Server

ALL = ("lease", "session", "routing")


class App:
    """One process of the control plane: some services behind one port."""

    def __init__(self, settings: ServeSettings, services: Sequence[str] = ALL) -> None:
        """Binds the port. Raises ValueError, OSError or RuntimeError for settings that cannot work."""
        self._settings = s = settings
        self.metrics = Metrics()
        self._server = Server(KeyRing.from_file(s.api_keys_file), s.host, s.port)
        redis = RedisStore(s.store_url, s.store_timeout, s.store_connections, s.watch_history, s.watch_limit)
        self._store = self.metrics.store(redis)
        self._jobs: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._endings: list[Callable[[], None]] = []
        self._closers: list[Callable[[], Awaitable[None]]] = [redis.aclose]
        self._tasks: list[asyncio.Task[None]] = []
        release = self._add_lease() if "lease" in services else self._remote_releaser()
        if "session" in services:
            self._add_session(release)
        if "routing" in services:
            self._add_routing()

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._server.port

    async def start(self) -> None:
        """Serves until :meth:`stop`. Raises OSError when the metrics port is taken."""
        if self._settings.metrics_port:
            server = MetricsServer(self.metrics, self._settings.host, self._settings.metrics_port)
            self._endings.append(server.stop)
        self._tasks = [asyncio.create_task(job()) for job in self._jobs]
        await self._server.start()

    async def broken(self) -> None:
        """Returns never, but raises what ends a background job that must go on."""
        await asyncio.gather(*self._tasks, asyncio.Event().wait())

    async def stop(self) -> None:
        """Ends links at once and other open calls within the grace, and closes everything."""
        for ending in self._endings:
            ending()
        await self._server.stop(self._settings.grace.total_seconds())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for close in self._closers:
            await close()

    def _add_lease(self) -> LeaseReleaser:
        s = self._settings
        mirror = Mirror(time.monotonic, s.gone_after.total_seconds())
        relay = LocalRelay(s.relay_timeout.total_seconds(), self.metrics.ticket)
        publisher = Publisher(mirror, self._store, s.beat_interval, lambda: secrets.token_hex(8))
        registry = Registry(mirror, relay, publisher, s.beat_interval)
        self._server.add(
            lease_pb2_grpc.add_LeaseServiceServicer_to_server,
            LeaseServicer(registry, s.link_backlog),
            "kvtide.lease.v1.LeaseService",
        )
        self._jobs += [publisher.run, lambda: expire_forever(registry, s.beat_interval.total_seconds() / 2)]
        self._endings.append(relay.close)
        return registry.release

    def _remote_releaser(self) -> LeaseReleaser:
        s = self._settings
        if not s.lease_address:
            return release_nothing
        releaser = RemoteReleaser(s.lease_address, s.service_api_key, s.relay_timeout)
        self._closers.append(releaser.aclose)
        return releaser

    def _add_session(self, release: LeaseReleaser) -> None:
        s = self._settings
        terms = Terms(s.session_ttl, s.session_ttl_min, s.session_ttl_max, s.idle_ttl)
        keeper = SessionKeeper(self._store, terms, release, lambda: uuid.uuid4().hex)
        self._server.add(
            session_pb2_grpc.add_SessionServiceServicer_to_server,
            SessionServicer(keeper, self._store, s.watch_checkpoint),
            "kvtide.session.v1.SessionService",
        )
        self._jobs.append(lambda: sweep_forever(keeper, s.sweep_interval.total_seconds()))

    def _add_routing(self) -> None:
        s = self._settings
        directory = EngineDirectory(self._store, time.monotonic, s.engines_max_age, s.engines_keep)
        if s.engines_max_age:
            self._jobs.append(directory.keep_fresh)
        patience = Patience(s.plan_await.total_seconds(), s.plan_poll.total_seconds(), time.monotonic)
        router = Router(directory, self._store, patience, Policy(s.recompute_threshold, s.forced))
        self._server.add(
            routing_pb2_grpc.add_RoutingServiceServicer_to_server,
            RoutingServicer(self.metrics.planner(router)),
            "kvtide.routing.v1.RoutingService",
        )
