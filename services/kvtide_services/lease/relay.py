"""Carries tickets between links. On the path of every reuse: no store, no waiting but for the links' own queues."""

import asyncio
from collections.abc import Callable

from kvtide.lease.v1 import lease_pb2 as pb

Outbox = asyncio.Queue[pb.AttachResponse | None]
OnTicket = Callable[[str], None]


class Relay:
    """The links that are up here, and who waits for which ticket."""

    def __init__(self, timeout: float, on_ticket: OnTicket) -> None:
        """``timeout``: seconds that a holder has to answer; ``on_ticket`` is told each outcome by name."""
        self._timeout = timeout
        self._on_ticket = on_ticket
        self._links: dict[str, tuple[str, Outbox]] = {}
        self._waiting: dict[str, tuple[Outbox, asyncio.TimerHandle]] = {}

    def join(self, engine: pb.Engine, outbox: Outbox) -> None:
        """A link is up; an older one of the same engine name is ended."""
        old = self._links.get(engine.name)
        self._links[engine.name] = (engine.boot_id, outbox)
        if old is not None:
            end(old[1])

    def leave(self, engine: pb.Engine, outbox: Outbox) -> None:
        """A link is down."""
        if self._links.get(engine.name, ("", None))[1] is outbox:
            del self._links[engine.name]

    def drop(self, engine: pb.Engine) -> None:
        """Ends the link of an engine that counts as gone, so that it attaches anew when it is alive after all."""
        boot_id, outbox = self._links.get(engine.name, ("", None))
        if outbox is not None and boot_id == engine.boot_id:
            end(outbox)

    def ask(self, request: pb.TicketRequest, reader: Outbox) -> None:
        """Passes a reader's ask on to the holder, or refuses it at once."""
        boot_id, holder = self._links.get(request.engine, ("", None))
        if holder is None:
            self._refuse(request.ticket_id, pb.TICKET_REFUSAL_UNREACHABLE, reader)
        elif boot_id != request.boot_id:
            self._refuse(request.ticket_id, pb.TICKET_REFUSAL_RESTARTED, reader)
        else:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self._timeout, self._expire, request.ticket_id)
            self._waiting[request.ticket_id] = (reader, timer)
            put(holder, pb.AttachResponse(ticket_request=request))

    def answer(self, response: pb.TicketResponse) -> bool:
        """Passes the holder's answer on; False when nobody waits for it any more."""
        reader, timer = self._waiting.pop(response.ticket_id, (None, None))
        if reader is None or timer is None:
            return False
        timer.cancel()
        self._on_ticket(pb.TicketRefusal.Name(response.refusal) if response.refusal else "granted")
        put(reader, pb.AttachResponse(ticket_response=response))
        return True

    def send(self, engine: str, message: pb.AttachResponse) -> bool:
        """Sends to an engine whose link is up here."""
        holder = self._links.get(engine, ("", None))[1]
        return holder is not None and put(holder, message)

    def close(self) -> None:
        """Ends every link."""
        for _, outbox in self._links.values():
            end(outbox)
        for _, timer in self._waiting.values():
            timer.cancel()

    def _expire(self, ticket_id: str) -> None:
        reader, _ = self._waiting.pop(ticket_id)
        self._refuse(ticket_id, pb.TICKET_REFUSAL_UNREACHABLE, reader)

    def _refuse(self, ticket_id: str, refusal: "pb.TicketRefusal.ValueType", reader: Outbox) -> None:
        self._on_ticket(pb.TicketRefusal.Name(refusal))
        put(reader, pb.AttachResponse(ticket_response=pb.TicketResponse(ticket_id=ticket_id, refusal=refusal)))


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
