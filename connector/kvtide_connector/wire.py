"""Between the rules' objects and the messages of the engine link."""

from google.protobuf.duration_pb2 import Duration

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_connector.holds import EndReason, Lease, Refusal, Ticket

_REASONS = {
    EndReason.SUPERSEDED: pb.LEASE_END_REASON_SUPERSEDED,
    EndReason.RELEASED: pb.LEASE_END_REASON_RELEASED,
    EndReason.EXPIRED: pb.LEASE_END_REASON_EXPIRED,
    EndReason.EVICTED: pb.LEASE_END_REASON_EVICTED,
    EndReason.LOST: pb.LEASE_END_REASON_LOST,
}
_REFUSALS = {
    Refusal.NOT_HELD: pb.TICKET_REFUSAL_NOT_HELD,
    Refusal.RESTARTED: pb.TICKET_REFUSAL_RESTARTED,
    Refusal.TOO_MANY: pb.TICKET_REFUSAL_TOO_MANY,
    Refusal.UNREACHABLE: pb.TICKET_REFUSAL_UNREACHABLE,
    Refusal.USED: pb.TICKET_REFUSAL_USED,
}


def duration(nanoseconds: int) -> Duration:
    """A span as a protobuf message."""
    return Duration(seconds=nanoseconds // 10**9, nanos=nanoseconds % 10**9)


def nanoseconds(span: Duration) -> int:
    """A protobuf span as the connector's clock counts it."""
    return span.seconds * 10**9 + span.nanos


def lease_message(lease: Lease, engine: pb.Engine, now: int) -> pb.Lease:
    """A lease as the directory sees it; ``now`` in nanoseconds."""
    return pb.Lease(
        lease_id=lease.lease_id,
        epoch=lease.epoch,
        engine=engine.name,
        boot_id=engine.boot_id,
        tenant=lease.owner.tenant,
        session_id=lease.owner.session_id,
        turn=lease.turn,
        num_tokens=len(lease.block_ids) * engine.block_size,
        last_hash=lease.hashes[-1],
        ttl=duration(max(0, lease.deadline - now)),
        own_tokens=lease.own_blocks * engine.block_size,
        granted_ttl=duration(lease.granted_ttl),
    )


def ended_message(lease: Lease, reason: EndReason, engine: pb.Engine) -> pb.LeaseEnded:
    """The end of a lease as the directory sees it."""
    tokens = len(lease.block_ids) * engine.block_size
    return pb.LeaseEnded(lease_id=lease.lease_id, epoch=lease.epoch, reason=_REASONS[reason], num_tokens=tokens)


def ticket_message(ticket_id: str, answer: Ticket | Refusal, holder: pb.Engine, now: int) -> pb.TicketResponse:
    """The holder's answer; ``now`` in nanoseconds."""
    if isinstance(answer, Refusal):
        return pb.TicketResponse(ticket_id=ticket_id, refusal=_REFUSALS[answer])
    return pb.TicketResponse(
        ticket_id=ticket_id,
        lease_id=answer.lease.lease_id,
        epoch=answer.lease.epoch,
        duration=duration(max(0, answer.deadline - now)),
        block_ids=answer.block_ids,
        block_hashes=answer.hashes,
        holder=holder,
    )


def refusal_words(refusal: "pb.TicketRefusal.ValueType") -> str:
    """A refusal for the reason header."""
    for known, value in _REFUSALS.items():
        if value == refusal:
            return known.value
    return "refused"
