"""The lease service's rules: one object that links, directory and store meet in."""

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_services.errors import LeaseNotFound, StoreUnavailable
from kvtide_services.lease.mirror import Change, Mirror
from kvtide_services.lease.relay import Outbox, Relay
from kvtide_services.store import Store

logger = logging.getLogger(__name__)


class Registry:
    """Registers engines, mirrors their leases, publishes both; what an absent store misses is published later."""

    def __init__(self, mirror: Mirror, relay: Relay, store: Store, beat: timedelta, incarnation: str) -> None:
        """``incarnation``: a fresh random string, written to a store that has none."""
        self._mirror = mirror
        self._relay = relay
        self._store = store
        self._beat = beat
        self._incarnation = incarnation
        self._due = Change()
        self._everything = True
        self._wake = asyncio.Event()

    def attach(self, hello: pb.Hello, outbox: Outbox) -> pb.Welcome:
        """Takes an engine in. Raises IncompatibleEngine."""
        self._publish(self._mirror.hello(hello))
        self._relay.join(hello.engine, outbox)
        logger.info("%s attached with %d leases (boot %s)", hello.engine.name, len(hello.leases), hello.engine.boot_id)
        welcome = pb.Welcome(protocol_version=min(1, hello.protocol_version))
        welcome.beat_interval.FromTimedelta(self._beat)
        return welcome

    def receive(self, engine: pb.Engine, message: pb.AttachRequest, outbox: Outbox) -> None:
        """Anything that an engine says after its hello."""
        match message.WhichOneof("message"):
            case "beat":
                self._mirror.heard(engine, message.beat)
            case "granted":
                self._publish(self._mirror.granted(engine, message.granted))
            case "ended":
                self._publish(self._mirror.ended(engine, message.ended))
            case "ticket_request":
                self._relay.ask(message.ticket_request, outbox)
            case "ticket_response":
                self._answer(engine, message.ticket_response)
            case "ticket_release":
                release = message.ticket_release
                self._relay.send(release.engine, pb.AttachResponse(ticket_release=release))

    def detach(self, engine: pb.Engine, outbox: Outbox) -> None:
        """The link ended."""
        self._relay.leave(engine, outbox)
        self._mirror.unlinked(engine)

    def lease(self, tenant: str, lease_id: str) -> pb.Lease:
        """Raises LeaseNotFound."""
        for lease in self._mirror.leases(tenant):
            if lease.lease_id == lease_id:
                return lease
        raise LeaseNotFound(lease_id)

    def leases(self, tenant: str, session_id: str) -> list[pb.Lease]:
        """A tenant's leases, of one session when named."""
        return self._mirror.leases(tenant, session_id)

    def engines(self) -> list[pb.EngineStatus]:
        """The engines that count as present."""
        found = self._mirror.attached()
        return [pb.EngineStatus(engine=a.engine, beat=a.beat, leases=len(a.leases)) for a in found]

    async def release(self, tenant: str, session_id: str, lease_id: str = "") -> int:
        """Tells the holders to end leases of a session; returns how many were told."""
        mine = self._mirror.leases(tenant, session_id)
        return sum(self._release(lease) for lease in mine if lease_id in ("", lease.lease_id))

    def _release(self, lease: pb.Lease) -> bool:
        order = pb.LeaseRelease(lease_id=lease.lease_id, epoch=lease.epoch)
        return self._relay.send(lease.engine, pb.AttachResponse(release=order))

    def _answer(self, engine: pb.Engine, response: pb.TicketResponse) -> None:
        if not self._relay.answer(response) and not response.refusal:
            over = pb.TicketRelease(ticket_id=response.ticket_id, engine=engine.name)
            self._relay.send(engine.name, pb.AttachResponse(ticket_release=over))

    # Publication.

    def _publish(self, change: Change) -> None:
        self._due = Change(self._due.put + change.put, self._due.dropped + change.dropped)
        self._wake.set()

    async def publish_forever(self) -> None:
        """Publishes changes as they come and everything that an emptied store lost. Ends by cancellation."""
        next_beat = asyncio.get_running_loop().time()
        while True:
            try:
                await self._publish_changes()
                if asyncio.get_running_loop().time() >= next_beat:
                    await self._publish_beat()
                    next_beat = asyncio.get_running_loop().time() + self._beat.total_seconds()
            except StoreUnavailable:
                self._everything = True
                await asyncio.sleep(self._beat.total_seconds() / 4)
            await self._pause(next_beat - asyncio.get_running_loop().time())

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _publish_changes(self) -> None:
        self._wake.clear()
        due, self._due = self._due, Change()
        if due.put:
            names = {lease.engine for lease in due.put}
            await self._put_engines(names)
            await self._store.put_leases(due.put)
        await self._drop(due.dropped)

    async def _drop(self, leases: Sequence[pb.Lease]) -> None:
        for lease in leases:
            await self._store.drop_lease(lease)

    async def _publish_beat(self) -> None:
        for attached in self._mirror.expire():
            logger.warning("%s is gone: no beat for too long", attached.engine.name)
            self._relay.drop(attached.engine)
            await self._store.drop_engine(attached.engine.name)
            await self._drop(list(attached.leases.values()))
        known = await self._store.incarnation(self._incarnation)
        if self._everything or not known:
            await self._store.put_leases([e for a in self._mirror.attached() for e in a.leases.values()])
            self._everything = False
        await self._put_engines(None)

    async def _put_engines(self, names: set[str] | None) -> None:
        for status in self.engines():
            if names is None or status.engine.name in names:
                await self._store.put_engine(status, 3 * self._beat)
