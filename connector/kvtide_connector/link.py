"""The engine link: one bidirectional gRPC stream to the lease service, on threads of its own.

The scheduler never waits for it. Without the service the engine goes on; asks then end at their own deadline.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import grpc

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide.lease.v1 import lease_pb2_grpc
from kvtide_connector import wire
from kvtide_connector.clock import Clock
from kvtide_connector.lessor import EndReason, Lease, Lessor, Owner, Refusal, Ticket

PROTOCOL_VERSION = 2
_DEFAULT_BEAT = 1.0

logger = logging.getLogger("vllm.kvtide.link")


class EngineLink:
    """Reports leases, answers and asks for tickets. Keeps itself connected until closed."""

    def __init__(
        self,
        engine: pb.Engine,
        address: str,
        api_key: str,
        retry: float,
        clock: Clock,
        load: Callable[[], pb.Beat],
    ) -> None:
        """``load`` fills in everything of a beat but the clock stamp; ``retry`` is in seconds."""
        self._engine = engine
        self._address = address
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._retry = retry
        self._clock = clock
        self._load = load
        self._lessor: Lessor | None = None
        self._outbox: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        self._asks: dict[str, Future[pb.TicketResponse]] = {}
        self._asks_lock = threading.Lock()
        self._beat_interval = _DEFAULT_BEAT
        self._closed = threading.Event()
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, name="kvtide-link", daemon=True)

    def start(self, lessor: Lessor | None) -> None:
        """Connects; ``lessor`` holds what this engine reports and tickets are asked for (None on a prefill engine)."""
        self._lessor = lessor
        self._thread.start()

    def close(self) -> None:
        """Ends the stream; safe to call twice."""
        self._closed.set()
        self._outbox.put(None)
        if self._call is not None:
            self._call.cancel()
        if self._thread.is_alive():
            self._thread.join(timeout=2)

    def granted(self, lease: Lease) -> None:
        """Reports a new lease."""
        self._send(pb.AttachRequest(granted=wire.lease_message(lease, self._engine, self._clock())))

    def ended(self, lease: Lease, reason: EndReason) -> None:
        """Reports the end of a lease."""
        self._send(pb.AttachRequest(ended=wire.ended_message(lease, reason)))

    def ask(self, request: pb.TicketRequest) -> "Future[pb.TicketResponse]":
        """Asks a holder for a ticket. The future may never be done: the caller keeps the deadline."""
        future: Future[pb.TicketResponse] = Future()
        with self._asks_lock:
            self._asks[request.ticket_id] = future
        self._send(pb.AttachRequest(ticket_request=request))
        return future

    def done(self, ticket_id: str, holder: str) -> None:
        """Tells the holder that a ticket is over; also forgets an ask that was given up."""
        with self._asks_lock:
            self._asks.pop(ticket_id, None)
        self._send(pb.AttachRequest(ticket_release=pb.TicketRelease(ticket_id=ticket_id, engine=holder)))

    def _send(self, message: pb.AttachRequest) -> None:
        if not self._closed.is_set():
            self._outbox.put(message)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._attach()
            except grpc.RpcError as error:
                self._log_lost(error)
            except Exception:  # one message that cannot be handled must not end the link for this start of the engine
                logger.exception("Engine link to %s failed and is made anew", self._address)
            self._closed.wait(self._retry)

    def _log_lost(self, error: grpc.RpcError) -> None:
        if self._closed.is_set():
            return
        code = error.code() if isinstance(error, grpc.Call) else error
        details = error.details() if isinstance(error, grpc.Call) else ""
        logger.warning("Engine link to %s lost: %s %s", self._address, code, details)

    def _attach(self) -> None:
        options = [
            ("grpc.keepalive_time_ms", 5000),
            ("grpc.keepalive_timeout_ms", 5000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.max_receive_message_length", 64 * 2**20),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        with grpc.insecure_channel(self._address, options) as channel:
            outbox: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
            outgoing = self._outgoing(pb.AttachRequest(hello=self._hello(outbox)), outbox)
            call = lease_pb2_grpc.LeaseServiceStub(channel).Attach(outgoing, metadata=self._metadata)
            self._call = call
            for message in call:
                self._handle(message)

    def _hello(self, outbox: "queue.SimpleQueue[pb.AttachRequest | None]") -> pb.Hello:
        """Switches to a fresh outbox before the snapshot: later changes follow it, earlier ones are in it."""
        old, self._outbox = self._outbox, outbox
        old.put(None)
        leases = self._lessor.leases() if self._lessor else []
        now = self._clock()
        return pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            engine=self._engine,
            leases=[wire.lease_message(lease, self._engine, now) for lease in leases],
        )

    def _outgoing(
        self, hello: pb.AttachRequest, outbox: "queue.SimpleQueue[pb.AttachRequest | None]"
    ) -> Iterator[pb.AttachRequest]:
        """The hello first, whatever other threads have put into the outbox meanwhile."""
        yield hello
        due = time.monotonic()
        while True:
            if (left := due - time.monotonic()) <= 0:
                due = time.monotonic() + self._beat_interval
                yield self._beat()
                continue
            try:
                message = outbox.get(timeout=left)
            except queue.Empty:
                continue
            if message is None:
                return
            yield message

    def _beat(self) -> pb.AttachRequest:
        beat = self._load()
        beat.clock_stamp = self._clock()
        return pb.AttachRequest(beat=beat)

    def _handle(self, message: pb.AttachResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "welcome":
            self._beat_interval = wire.nanoseconds(message.welcome.beat_interval) / 1e9 or _DEFAULT_BEAT
            logger.info("Engine link to %s is up as %s", self._address, self._engine.name)
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
                lessor.renew(renewal.lease_id, wire.nanoseconds(renewal.ttl))

    def _answer(self, request: pb.TicketRequest) -> None:
        answer: Ticket | Refusal
        if self._lessor is None:
            answer = Refusal.NOT_HELD
        elif request.boot_id != self._engine.boot_id:
            answer = Refusal.RESTARTED
        else:
            owner = Owner(request.tenant, request.session_id)
            span = wire.nanoseconds(request.duration)
            answer = self._lessor.ticket(request.ticket_id, owner, request.prompt_hash_prefixes, span)
        response = wire.ticket_message(request.ticket_id, answer, self._engine, self._clock())
        self._send(pb.AttachRequest(ticket_response=response))

    def _resolve(self, response: pb.TicketResponse) -> None:
        with self._asks_lock:
            future = self._asks.pop(response.ticket_id, None)
        if future is not None:
            future.set_result(response)
        elif not response.refusal:
            self.done(response.ticket_id, response.holder.name)
