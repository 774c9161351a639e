"""The engines as routing knows them: read from the store ahead of plans, remembered while it is away."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

from kvtide.lease.v1 import lease_pb2
from kvtide_services.errors import StoreUnavailable
from kvtide_services.store import EngineStore

Statuses = list[lease_pb2.EngineStatus]


class EngineDirectory:
    """Reads the engine list at most once per ``max_age``. Times are seconds of the injected clock."""

    def __init__(self, store: EngineStore, clock: Callable[[], float], max_age: timedelta, keep: timedelta) -> None:
        """``keep``: how long the last list is used while the store says nothing."""
        self._store = store
        self._clock = clock
        self._max_age = max_age.total_seconds()
        self._keep = keep.total_seconds()
        self._known: Statuses = []
        self._read_at = -float("inf")
        self._tried_at = -float("inf")
        self._reading = asyncio.Lock()

    async def engines(self, model: str) -> Statuses:
        """The engines that serve a model; those last known when the store does not answer."""
        return [status for status in await self.all() if status.engine.model == model]

    async def all(self) -> Statuses:
        """Every engine. Reads the list when :meth:`keep_fresh` has not."""
        if self._stale:
            async with self._reading:
                if self._stale:
                    await self._read()
        return self._known if self._clock() - self._read_at <= self._keep else []

    async def keep_fresh(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Reads the list before it is too old, so that no plan waits for it. Ends by cancellation."""
        while True:
            async with self._reading:
                await self._read()
            await sleep(self._max_age / 2)

    @property
    def _stale(self) -> bool:
        return self._clock() - self._tried_at >= self._max_age

    async def _read(self) -> None:
        try:
            self._known = await self._store.engines()
            self._read_at = self._clock()
        except StoreUnavailable:
            return
        finally:
            # After the attempt: a store that does not answer is then left alone for a while.
            self._tried_at = self._clock()
