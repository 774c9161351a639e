"""The lease service's rules: one object that links and directory meet in."""

import asyncio
import logging
from datetime import timedelta

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_services.errors import LeaseNotFound
from kvtide_services.lease.mirror import PROTOCOL_VERSION, Change, Mirror
from kvtide_services.lease.publisher import Publisher
from kvtide_services.lease.relay import Outbox, Relay

logger = logging.getLogger(__name__)


class Registry:
    """Registers engines, mirrors what they hold, hands messages on."""

    def __init__(self, mirror: Mirror, relay: Relay, publisher: Publisher, beat: timedelta) -> None:
        """``beat``: how often engines are asked to report."""
        self._mirror = mirror
        self._relay = relay
        self._publisher = publisher
        self._beat = beat

    def attach(self, hello: pb.Hello, outbox: Outbox) -> pb.Welcome:
        """Takes an engine in. Raises IncompatibleEngine."""
        self._publisher.changed(self._mirror.hello(hello))
        self._relay.join(hello.engine, outbox)
        logger.info("%s attached with %d leases (boot %s)", hello.engine.name, len(hello.leases), hello.engine.boot_id)
        welcome = pb.Welcome(protocol_version=min(PROTOCOL_VERSION, hello.protocol_version))
        welcome.beat_interval.FromTimedelta(self._beat)
        return welcome

    def receive(self, engine: pb.Engine, message: pb.AttachRequest, outbox: Outbox) -> None:
        """Anything that an engine says after its hello."""
        match message.WhichOneof("message"):
            case "ticket_request":
                self._relay.ask(message.ticket_request, outbox)
            case "ticket_response":
                self._relay.answer(engine, message.ticket_response, outbox)
            case "ticket_release":
                release = message.ticket_release
                self._relay.send(release.engine, pb.AttachResponse(ticket_release=release))
            case "beat":
                self._mirror.heard(engine, message.beat)
            case "granted":
                self._publisher.changed(self._mirror.granted(engine, message.granted))
            case "ended":
                self._publisher.changed(self._mirror.ended(engine, message.ended))

    def detach(self, engine: pb.Engine, outbox: Outbox) -> None:
        """The link ended; the engine is believed until its beats have been missed for too long."""
        self._relay.leave(engine, outbox)

    def expire(self) -> list[str]:
        """Takes out engines that were silent for too long; returns their names."""
        gone = self._mirror.expire()
        for attached in gone:
            logger.warning("%s is gone: no beat for too long", attached.engine.name)
            self._relay.drop(attached.engine)
            leases = tuple(held.lease for held in attached.held.values())
            self._publisher.changed(Change(attached.engine.name, dropped=leases))
        return [attached.engine.name for attached in gone]

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
        """The engines that count as present, by name."""
        return [attached.status for attached in self._mirror.attached()]

    async def release(self, tenant: str, session_id: str, lease_id: str = "") -> int:
        """Tells the holders to end leases of a session; returns how many were told."""
        mine = self._mirror.leases(tenant, session_id)
        return sum(self._release(lease) for lease in mine if lease_id in ("", lease.lease_id))

    def _release(self, lease: pb.Lease) -> bool:
        order = pb.LeaseRelease(lease_id=lease.lease_id, epoch=lease.epoch)
        return self._relay.send(lease.engine, pb.AttachResponse(release=order))


async def expire_forever(registry: Registry, interval: float) -> None:
    """Looks for silent engines. Ends by cancellation."""
    while True:
        registry.expire()
        await asyncio.sleep(interval)
