"""Builds the services from their settings: the one place that knows every part."""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc

from kvtide.lease.v1 import lease_pb2, lease_pb2_grpc
from kvtide.routing.v1 import routing_pb2_grpc
from kvtide.session.v1 import session_pb2_grpc
from kvtide_services.auth import TENANT_KEY, KeyRing
from kvtide_services.config import ServeSettings
from kvtide_services.errors import StoreUnavailable
from kvtide_services.lease.mirror import Mirror
from kvtide_services.lease.relay import Relay
from kvtide_services.lease.service import Registry
from kvtide_services.lease.servicer import LeaseServicer
from kvtide_services.routing.directory import EngineDirectory
from kvtide_services.routing.router import Router
from kvtide_services.routing.servicer import RoutingServicer
from kvtide_services.session.keeper import LeaseReleaser, SessionKeeper, Terms
from kvtide_services.session.servicer import SessionServicer
from kvtide_services.store.redis import RedisStore
from kvtide_services.transport.server import Server

logger = logging.getLogger(__name__)

ALL = ("lease", "session", "routing")


class App:
    """One process of the control plane: some services behind one port."""

    def __init__(self, settings: ServeSettings, services: tuple[str, ...] = ALL) -> None:
        """Binds the port. Raises ValueError, OSError or RuntimeError for settings that cannot work."""
        self._settings = settings
        self._store = RedisStore(settings.store_url, settings.store_timeout, settings.watch_history)
        self._server = Server(KeyRing.from_file(settings.api_keys_file), settings.host, settings.port)
        self._jobs: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._relay: Relay | None = None
        release = self._add_lease() if "lease" in services else self._remote_release
        if "session" in services:
            self._add_session(release)
        if "routing" in services:
            self._add_routing()

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._server.port

    async def start(self) -> None:
        """Serves until :meth:`stop`."""
        await self._server.start()
        self._tasks = [asyncio.create_task(job()) for job in self._jobs]

    async def stop(self) -> None:
        """Ends open calls within the grace and closes everything."""
        if self._relay is not None:
            self._relay.close()
        await self._server.stop(self._settings.grace.total_seconds())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for close in self._closers:
            await close()
        await self._store.aclose()

    def _add_lease(self) -> LeaseReleaser:
        settings = self._settings
        mirror = Mirror(time.monotonic, 3 * settings.beat_interval.total_seconds())
        self._relay = Relay(settings.relay_timeout.total_seconds(), lambda outcome: logger.debug("ticket %s", outcome))
        registry = Registry(mirror, self._relay, self._store, settings.beat_interval, secrets.token_hex(8))
        servicer = LeaseServicer(registry, settings.link_backlog)
        self._server.add(lease_pb2_grpc.add_LeaseServiceServicer_to_server, servicer, "kvtide.lease.v1.LeaseService")
        self._jobs.append(registry.publish_forever)
        return registry.release

    def _add_session(self, release: LeaseReleaser) -> None:
        s = self._settings
        terms = Terms(s.session_ttl, s.session_ttl_min, s.session_ttl_max, s.idle_ttl)
        keeper = SessionKeeper(self._store, terms, release, lambda: uuid.uuid4().hex)
        servicer = SessionServicer(keeper, self._store, s.watch_checkpoint)
        self._server.add(
            session_pb2_grpc.add_SessionServiceServicer_to_server, servicer, "kvtide.session.v1.SessionService"
        )
        self._jobs.append(lambda: _sweep_forever(keeper, s.sweep_interval.total_seconds()))

    def _add_routing(self) -> None:
        s = self._settings
        directory = EngineDirectory(self._store, time.monotonic, s.engines_max_age, s.engines_keep)
        router = Router(
            directory, self._store, self._store, time.monotonic, s.plan_await, s.recompute_threshold, s.forced
        )
        self._server.add(
            routing_pb2_grpc.add_RoutingServiceServicer_to_server,
            RoutingServicer(router),
            "kvtide.routing.v1.RoutingService",
        )

    async def _remote_release(self, tenant: str, session_id: str) -> int:
        """Asks the lease service of another process; its blocks then end at their own deadline when it is away."""
        if not self._settings.lease_address:
            return 0
        key = self._settings.service_api_key
        metadata = [(TENANT_KEY, tenant)] + ([("authorization", f"Bearer {key}")] if key else [])
        request = lease_pb2.ReleaseLeasesRequest(session_id=session_id)
        try:
            stub: Any = lease_pb2_grpc.LeaseServiceStub(self._lease_channel())
            timeout = self._settings.relay_timeout.total_seconds()
            response = await stub.ReleaseLeases(request, metadata=metadata, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            logger.warning("The lease service did not release the blocks of a session: %s", error.code())
            return 0
        return int(response.released)

    def _lease_channel(self) -> Any:
        if not hasattr(self, "_channel"):
            self._channel = grpc.aio.insecure_channel(self._settings.lease_address)
            self._closers.append(self._channel.close)
        return self._channel


async def _sweep_forever(keeper: SessionKeeper, interval: float) -> None:
    while True:
        try:
            await keeper.sweep()
        except StoreUnavailable:
            logger.warning("The store does not answer; sessions lapse when it does")
        await asyncio.sleep(interval)
