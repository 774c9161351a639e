"""Carries messages between links. On the path of every reuse: no store, no waiting but for the links' own queues."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvtide.lease.v1 import lease_pb2 as pb

Outbox = asyncio.Queue[pb.AttachResponse | None]
OnTicket = Callable[[str], None]
UNREACHABLE, RESTARTED = pb.TICKET_REFUSAL_UNREACHABLE, pb.TICKET_REFUSAL_RESTARTED


class Relay(Protocol):
    """Reaches engines by name, wherever their links are."""

    def join(self, engine: pb.Engine, outbox: Outbox) -> None:
        """A link is up; an older one of the same engine name is ended."""

    def leave(self, engine: pb.Engine, outbox: Outbox) -> None:
        """A link is down."""

    def drop(self, engine: pb.Engine) -> None:
        """Ends the link of an engine that counts as gone, so that it attaches anew when it is alive after all."""

    def ask(self, request: pb.TicketRequest, reader: Outbox) -> None:
        """Passes a reader's ask on to the holder, or refuses it."""

    def answer(self, engine: pb.Engine, response: pb.TicketResponse, holder: Outbox) -> None:
        """Passes the answer of the holder ``engine`` on; a ticket that nobody waits for any more is given back."""

    def send(self, engine: str, message: pb.AttachResponse) -> bool:
        """Sends to an engine; False when it cannot be reached."""

    def close(self) -> None:
        """Ends every link."""


@dataclass(frozen=True)
class _Ask:
    reader: Outbox
    holder: Outbox
    timer: asyncio.TimerHandle


class LocalRelay:
    """The links that are up in this process, and who waits for which ticket."""

    def __init__(self, timeout: float, on_ticket: OnTicket) -> None:
        """``timeout``: seconds that a holder has to answer; ``on_ticket`` is told each outcome by name."""
        self._timeout = timeout
        self._on_ticket = on_ticket
        self._links: dict[str, tuple[str, Outbox]] = {}
        self._asks: dict[str, _Ask] = {}

    def join(self, engine: pb.Engine, outbox: Outbox) -> None:
        old = self._links.get(engine.name)
        self._links[engine.name] = (engine.boot_id, outbox)
        if old is not None:
            self._forget(old[1])
            end(old[1])

    def leave(self, engine: pb.Engine, outbox: Outbox) -> None:
        if self._links.get(engine.name, ("", None))[1] is outbox:
            del self._links[engine.name]
        self._forget(outbox)

    def drop(self, engine: pb.Engine) -> None:
        boot_id, outbox = self._links.get(engine.name, ("", None))
        if outbox is not None and boot_id == engine.boot_id:
            end(outbox)

    def ask(self, request: pb.TicketRequest, reader: Outbox) -> None:
        boot_id, holder = self._links.get(request.engine, ("", None))
        if holder is None:
            self._refuse(request.ticket_id, UNREACHABLE, reader)
        elif boot_id != request.boot_id:
            self._refuse(request.ticket_id, RESTARTED, reader)
        else:
            self._pop(request.ticket_id)
            timer = asyncio.get_running_loop().call_later(self._timeout, self._expire, request.ticket_id)
            self._asks[request.ticket_id] = _Ask(reader, holder, timer)
            put(holder, pb.AttachResponse(ticket_request=request))

    def answer(self, engine: pb.Engine, response: pb.TicketResponse, holder: Outbox) -> None:
        ask = self._asks.get(response.ticket_id)
        if ask is not None and ask.holder is holder:
            self._pop(response.ticket_id)
            self._on_ticket(outcome(response.refusal))
            put(ask.reader, pb.AttachResponse(ticket_response=response))
        elif not response.refusal:
            over = pb.TicketRelease(ticket_id=response.ticket_id, engine=engine.name)
            put(holder, pb.AttachResponse(ticket_release=over))

    def send(self, engine: str, message: pb.AttachResponse) -> bool:
        holder = self._links.get(engine, ("", None))[1]
        return holder is not None and put(holder, message)

    def close(self) -> None:
        for _, outbox in self._links.values():
            end(outbox)
        for ticket_id in list(self._asks):
            self._pop(ticket_id)

    def _pop(self, ticket_id: str) -> _Ask | None:
        ask = self._asks.pop(ticket_id, None)
        if ask is not None:
            ask.timer.cancel()
        return ask

    def _forget(self, outbox: Outbox) -> None:
        """Nobody answers over a link that is down, and nobody reads what is sent there."""
        for ticket_id, ask in list(self._asks.items()):
            if outbox is ask.holder:
                self._expire(ticket_id)
            elif outbox is ask.reader:
                self._pop(ticket_id)

    def _expire(self, ticket_id: str) -> None:
        ask = self._pop(ticket_id)
        if ask is not None:
            self._refuse(ticket_id, UNREACHABLE, ask.reader)

    def _refuse(self, ticket_id: str, refusal: "pb.TicketRefusal.ValueType", reader: Outbox) -> None:
        self._on_ticket(outcome(refusal))
        put(reader, pb.AttachResponse(ticket_response=pb.TicketResponse(ticket_id=ticket_id, refusal=refusal)))


def outcome(refusal: "pb.TicketRefusal.ValueType") -> str:
    """A name for counters: "granted", or why not, in lower case; of a later version's refusals "other"."""
    if refusal == pb.TICKET_REFUSAL_UNSPECIFIED:
        return "granted"
    known = refusal in pb.TicketRefusal.values()
    return pb.TicketRefusal.Name(refusal).removeprefix("TICKET_REFUSAL_").lower() if known else "other"


def put(outbox: Outbox, message: pb.AttachResponse) -> bool:
    """Queues a message; a link that does not read is ended, and its engine will attach anew."""
    try:
        outbox.put_nowait(message)
    except asyncio.QueueFull:
        end(outbox)
        return False
    return True


def end(outbox: Outbox) -> None:
    """Ends a link after dropping what it did not take."""
    while not outbox.empty():
        outbox.get_nowait()
    outbox.put_nowait(None)
