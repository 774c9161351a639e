"""Publishes the mirror to the store, and again what a store missed or lost."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_services.errors import StoreUnavailable
from kvtide_services.lease.mirror import Change, Mirror
from kvtide_services.store import Store

logger = logging.getLogger(__name__)

# What falls out of it while the store is away ends in the store with its own TTL.
_MAX_DROPPED = 100_000


class Publisher:
    """Keeps the store's copy of the mirror. Links never wait for it."""

    def __init__(self, mirror: Mirror, store: Store, beat: timedelta, new_id: Callable[[], str]) -> None:
        """``new_id`` makes a fresh incarnation for a store that has none."""
        self._mirror = mirror
        self._store = store
        self._beat = beat
        self._new_id = new_id
        self._engines: set[str] = set()
        self._put: list[pb.Lease] = []
        self._dropped: deque[pb.Lease] = deque(maxlen=_MAX_DROPPED)
        self._seen: str | None = None
        self._wake = asyncio.Event()

    def changed(self, change: Change) -> None:
        """Has a change published soon."""
        self._engines.add(change.engine)
        self._put += change.put
        self._dropped += change.dropped
        self._wake.set()

    async def run(self) -> None:
        """Publishes changes as they come and the whole beat by beat. Ends by cancellation."""
        loop, beat = asyncio.get_running_loop(), self._beat.total_seconds()
        due = loop.time()
        while True:
            self._wake.clear()
            try:
                if loop.time() >= due:
                    due = loop.time() + beat
                    await self.publish_beat()
                await self.publish_changes()
            except StoreUnavailable:
                logger.warning("The store does not answer; it is told everything when it does")
                await asyncio.sleep(beat / 2)
            await self._pause(due - loop.time())

    async def publish_changes(self) -> None:
        """Raises StoreUnavailable; then everything will be published at a beat, and what ended is kept in mind."""
        names, self._engines = self._engines, set()
        puts, self._put = self._put, []
        drops = list(self._dropped)
        self._dropped.clear()
        try:
            await self._put_engines(names)
            await self._drop_engines(names)
            # Ended leases after granted ones: each drop spares a later grant.
            await self._store.put_leases(puts)
            await self._store.drop_leases(drops)
        except StoreUnavailable:
            self._seen = None
            self._dropped.extendleft(reversed(drops))
            raise

    async def publish_beat(self) -> None:
        """Republishes the engines, and all leases to a store that is new or was away. Raises StoreUnavailable."""
        try:
            incarnation = await self._store.incarnation()
            if not incarnation or incarnation != self._seen:
                await self._publish_everything(incarnation)
            else:
                await self._put_engines(None)
        except StoreUnavailable:
            self._seen = None
            raise

    async def _publish_everything(self, incarnation: str) -> None:
        """The incarnation comes last: readers trust a store that has one."""
        leases = self._mirror.every_lease()
        await self._put_engines(None)
        await self._store.put_leases(leases)
        self._seen = incarnation or await self._store.begin(self._new_id())
        logger.info("Published everything: %d leases", len(leases))

    async def _put_engines(self, names: Iterable[str] | None) -> None:
        statuses = [a.status for a in self._mirror.attached() if names is None or a.engine.name in names]
        await self._store.put_engines(statuses, 3 * self._beat)

    async def _drop_engines(self, names: Iterable[str]) -> None:
        """Those that are no longer attached; a record that the store keeps for want of this ends by its own TTL."""
        for name in sorted(set(names) - {a.engine.name for a in self._mirror.attached()}):
            await self._store.drop_engine(name)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._wake.wait()
        except TimeoutError:
            return
