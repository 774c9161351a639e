"""The engines as routing knows them: read from the store, remembered while it is away."""

from collections.abc import Callable
from datetime import timedelta

from kvtide.lease.v1 import lease_pb2
from kvtide_services.errors import StoreUnavailable
from kvtide_services.store import EngineStore

Statuses = list[lease_pb2.EngineStatus]


class EngineDirectory:
    """Reads the engine list at most once per ``max_age``. Times are seconds of the injected clock."""

    def __init__(self, store: EngineStore, clock: Callable[[], float], max_age: timedelta, keep: timedelta) -> None:
        self._store = store
        self._clock = clock
        self._max_age = max_age.total_seconds()
        self._keep = keep.total_seconds()
        self._known: Statuses = []
        self._read_at = -float("inf")
        self._tried_at = -float("inf")

    async def engines(self, model: str) -> Statuses:
        """The engines that serve a model; those last known when the store does not answer."""
        return [status for status in await self.all() if status.engine.model == model]

    async def all(self) -> Statuses:
        """Every engine."""
        now = self._clock()
        if now - self._tried_at >= self._max_age:
            self._tried_at = now
            await self._read(now)
        return self._known if now - self._read_at <= self._keep else []

    async def _read(self, now: float) -> None:
        try:
            found = await self._store.engines()
        except StoreUnavailable:
            return
        self._known, self._read_at = found, now
