"""The engine link: one bidirectional gRPC stream to the lease service, on threads of its own.

The scheduler never waits for it. Without the service the engine goes on; asks then end at their own deadline.
"""

import logging
import queue
import threading
import time
from collections.abc import Iterator

import grpc

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide.lease.v1 import lease_pb2_grpc
from kvtide_connector.dialogue import Dialogue

_GOODBYE_SECONDS = 1.0

logger = logging.getLogger("vllm.kvtide.link")
Outbox = queue.SimpleQueue[pb.AttachRequest | None]


class EngineLink:
    """Carries a dialogue. Keeps itself connected until closed."""

    def __init__(self, dialogue: Dialogue, address: str, api_key: str, retry: float) -> None:
        """``retry`` is in seconds."""
        self._dialogue = dialogue
        self._address = address
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._retry = retry
        self._outbox: Outbox = queue.SimpleQueue()
        self._closed = threading.Event()
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, name="kvtide-link", daemon=True)
        dialogue.send = self._send

    def start(self) -> None:
        """Connects."""
        self._thread.start()

    def close(self) -> None:
        """Says goodbye, so that what this engine held is reported lost at once, and ends; safe to call twice."""
        self._send(pb.AttachRequest(goodbye=pb.Goodbye()))
        self._closed.set()
        self._outbox.put(None)
        self._join(_GOODBYE_SECONDS)
        if self._call is not None:
            self._call.cancel()
        self._join(_GOODBYE_SECONDS)

    def _join(self, seconds: float) -> None:
        if self._thread.is_alive():
            self._thread.join(seconds)

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
            outbox: Outbox = queue.SimpleQueue()
            outgoing = self._outgoing(self._hello(outbox), outbox)
            call = lease_pb2_grpc.LeaseServiceStub(channel).Attach(outgoing, metadata=self._metadata)
            self._call = call
            for message in call:
                self._dialogue.handle(message)

    def _hello(self, outbox: Outbox) -> pb.AttachRequest:
        """Switches to a fresh outbox before the snapshot: later changes follow it, earlier ones are in it."""
        old, self._outbox = self._outbox, outbox
        old.put(None)
        if self._closed.is_set():
            outbox.put(None)
        return pb.AttachRequest(hello=self._dialogue.hello())

    def _outgoing(self, hello: pb.AttachRequest, outbox: Outbox) -> Iterator[pb.AttachRequest]:
        """The hello first, whatever other threads have put into the outbox meanwhile."""
        yield hello
        due = time.monotonic()
        while True:
            if (left := due - time.monotonic()) <= 0:
                due = time.monotonic() + self._dialogue.beat_interval
                yield self._dialogue.beat()
                continue
            try:
                message = outbox.get(timeout=left)
            except queue.Empty:
                continue
            if message is None:
                return
            yield message
