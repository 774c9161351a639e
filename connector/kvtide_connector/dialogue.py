"""What an engine says to the lease service and how it answers. Rules only: no transport, no threads of its own."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_connector import wire
from kvtide_connector.clock import Clock
from kvtide_connector.holds import EndReason, Lease, Owner, Refusal, Ticket
from kvtide_connector.lessor import Lessor

PROTOCOL_VERSION = 2
_DEFAULT_BEAT = 1.0
_REMEMBERED_ENDS = 256
"""Ends of the last seconds before a link broke fit in; a hello stays small."""

logger = logging.getLogger("vllm.kvtide.link")


class Dialogue:
    """Reports leases, answers and asks for tickets. Thread-safe."""

    def __init__(self, engine: pb.Engine, clock: Clock, load: Callable[[], pb.Beat]) -> None:
        """``load`` fills in everything of a beat but the clock stamp."""
        self.engine = engine
        self.send: Callable[[pb.AttachRequest], object] = lambda message: None
        """How messages leave; set by the transport. What is sent while no link is up is covered by the next hello."""
        self.beat_interval = _DEFAULT_BEAT
        """Seconds; as the service asked."""
        self._clock = clock
        self._load = load
        self._lessor: Lessor | None = None
        self._ends: deque[pb.LeaseEnded] = deque(maxlen=_REMEMBERED_ENDS)
        self._asks: dict[str, Future[pb.TicketResponse]] = {}
        self._asks_lock = threading.Lock()

    def speaks_for(self, lessor: Lessor) -> None:
        """``lessor`` holds what this engine reports and what tickets are asked for; a prefill engine has none."""
        self._lessor = lessor

    def hello(self) -> pb.Hello:
        """Everything held now, and what ended lately."""
        ends = list(self._ends)
        leases = self._lessor.leases() if self._lessor else []
        now = self._clock()
        return pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            engine=self.engine,
            leases=[wire.lease_message(lease, self.engine, now) for lease in leases],
            ended=ends,
        )

    def beat(self) -> pb.AttachRequest:
        """The load, and this engine's clock."""
        beat = self._load()
        beat.clock_stamp = self._clock()
        return pb.AttachRequest(beat=beat)

    def granted(self, lease: Lease) -> None:
        """Reports a lease that is new or changed."""
        self.send(pb.AttachRequest(granted=wire.lease_message(lease, self.engine, self._clock())))

    def ended(self, lease: Lease, reason: EndReason) -> None:
        """Reports the end of a lease."""
        message = wire.ended_message(lease, reason, self.engine)
        self._ends.append(message)
        self.send(pb.AttachRequest(ended=message))

    def ask(self, request: pb.TicketRequest) -> "Future[pb.TicketResponse]":
        """Asks a holder for a ticket. The future may never be done: the caller keeps the deadline."""
        future: Future[pb.TicketResponse] = Future()
        with self._asks_lock:
            self._asks[request.ticket_id] = future
        self.send(pb.AttachRequest(ticket_request=request))
        return future

    def done(self, ticket_id: str, holder: str) -> None:
        """Tells the holder that a ticket is over; also forgets an ask that was given up."""
        with self._asks_lock:
            self._asks.pop(ticket_id, None)
        self.send(pb.AttachRequest(ticket_release=pb.TicketRelease(ticket_id=ticket_id, engine=holder)))

    def handle(self, message: pb.AttachResponse) -> None:
        """Takes in whatever the service sends."""
        kind = message.WhichOneof("message")
        if kind == "welcome":
            self.beat_interval = wire.nanoseconds(message.welcome.beat_interval) / 1e9 or _DEFAULT_BEAT
            logger.info("Engine link is up as %s", self.engine.name)
        elif kind == "ticket_request":
            self._answer(message.ticket_request)
        elif kind == "ticket_response":
            self._resolve(message.ticket_response)
        elif self._lessor is not None:
            self._obey(self._lessor, message)

    def _obey(self, lessor: Lessor, message: pb.AttachResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "ticket_release":
            lessor.end_ticket(message.ticket_release.ticket_id)
        elif kind == "release":
            lessor.release(message.release.lease_id, message.release.epoch)
        elif kind == "renewals":
            for renewal in message.renewals.renewals:
                lessor.renew(renewal.lease_id, wire.nanoseconds(renewal.ttl), renewal.epoch)

    def _answer(self, request: pb.TicketRequest) -> None:
        answer = self._ticket(request)
        response = wire.ticket_message(request.ticket_id, answer, self.engine, self._clock())
        self.send(pb.AttachRequest(ticket_response=response))

    def _ticket(self, request: pb.TicketRequest) -> Ticket | Refusal:
        if self._lessor is None:
            return Refusal.NOT_HELD
        if request.boot_id != self.engine.boot_id:
            return Refusal.RESTARTED
        owner = Owner(request.tenant, request.session_id)
        span = wire.nanoseconds(request.duration)
        return self._lessor.ticket(request.ticket_id, request.attempt_id, owner, request.prompt_hash_prefixes, span)

    def _resolve(self, response: pb.TicketResponse) -> None:
        with self._asks_lock:
            future = self._asks.pop(response.ticket_id, None)
        if future is not None:
            future.set_result(response)
        elif not response.refusal:
            self.done(response.ticket_id, response.holder.name)
