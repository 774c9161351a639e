"""``kv_transfer_params`` of both legs: vLLM's own fields and our signed directive."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from google.protobuf.duration_pb2 import Duration

from kvtide import directive as directives
from kvtide.lease.v1 import directive_pb2 as pb
from kvtide_gateway.bodies import PARAMS_FIELD
from kvtide_gateway.plan import Lease, Plan

PREFILL_KEY = "kvtide_prefill"


class MalformedReference(Exception):
    """P's answer carries a reference that cannot be read."""


@dataclass(frozen=True)
class Prefilled:
    """P's blocks as vLLM names them, and what D must verify before it reads them."""

    params: dict[str, Any]
    num_tokens: int
    last_block_hash: bytes
    tail_token_ids: tuple[int, ...]
    lease: timedelta
    pairing_digest: str
    reused_tokens: int
    reason: str


@dataclass(frozen=True)
class Attempt:
    """One try of one turn; the legs of one attempt share its id."""

    attempt_id: str
    request_id: str
    tenant: str
    session_id: str
    retain: bool
    plan: Plan


class Signer:
    """Makes the params of each leg, signed with the key that connectors know."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def for_prefill(self, attempt: Attempt) -> dict[str, Any]:
        """P computes, reading D's leased blocks for PREFILL_REUSE, and keeps its blocks for D."""
        message = _directive(attempt, pb.LEG_PREFILL)
        return {"do_remote_decode": True, "do_remote_prefill": False, **self._signed(message)}

    def for_decode(self, attempt: Attempt, prefilled: Prefilled | None) -> dict[str, Any]:
        """D reads P's blocks, if there are any, and keeps its own at the end, if that was asked."""
        message = _directive(attempt, pb.LEG_DECODE)
        message.retain = attempt.retain
        if prefilled is None:
            return self._signed(message)
        message.prefill.CopyFrom(_reference(prefilled, attempt.plan.decode.clock_stamp))
        return {**prefilled.params, **self._signed(message)}

    def _signed(self, message: pb.TurnDirective) -> dict[str, Any]:
        return {directives.PARAMS_KEY: directives.encode(message, self._key)}


def _directive(attempt: Attempt, leg: "pb.Leg.ValueType") -> pb.TurnDirective:
    plan = attempt.plan
    message = pb.TurnDirective(
        protocol_version=directives.PROTOCOL_VERSION,
        leg=leg,
        tenant=attempt.tenant,
        session_id=attempt.session_id,
        turn=plan.turn,
        attempt_id=attempt.attempt_id,
        strategy=pb.Strategy.Value(f"STRATEGY_{plan.strategy}"),
        request_id=attempt.request_id,
    )
    if plan.lease is not None and _reads_lease(plan, leg):
        message.lease.CopyFrom(_lease(plan.lease))
    return message


def _reads_lease(plan: Plan, leg: "pb.Leg.ValueType") -> bool:
    return plan.strategy.uses_lease and plan.strategy.uses_prefill == (leg == pb.LEG_PREFILL)


def _lease(lease: Lease) -> pb.LeaseRef:
    return pb.LeaseRef(lease_id=lease.lease_id, epoch=lease.epoch, engine=lease.engine, boot_id=lease.boot_id)


def _reference(prefilled: Prefilled, stamp: int) -> pb.PrefillRef:
    duration = Duration()
    duration.FromTimedelta(prefilled.lease)
    return pb.PrefillRef(
        num_tokens=prefilled.num_tokens,
        last_block_hash=prefilled.last_block_hash,
        tail_token_ids=prefilled.tail_token_ids,
        lease_duration=duration,
        reader_clock_stamp=stamp,
        pairing_digest=prefilled.pairing_digest,
    )


def prefilled(answer: Any) -> Prefilled | None:
    """What P's JSON answer offers D; None when P exported nothing. Raises MalformedReference."""
    if not isinstance(answer, dict):
        raise MalformedReference("no JSON object")
    params = answer.get(PARAMS_FIELD)
    facts = params.get(PREFILL_KEY) if isinstance(params, dict) else None
    if not isinstance(params, dict) or facts is None:
        return None
    try:
        return _read(params, facts)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise MalformedReference(repr(error)) from error


def _read(params: dict[str, Any], facts: dict[str, Any]) -> Prefilled:
    found = Prefilled(
        params={key: value for key, value in params.items() if key != PREFILL_KEY},
        num_tokens=int(facts["num_tokens"]),
        last_block_hash=bytes.fromhex(facts["last_block_hash"]),
        tail_token_ids=tuple(int(token) for token in facts["tail_token_ids"]),
        lease=timedelta(seconds=float(facts["lease_duration_s"])),
        pairing_digest=str(facts["pairing_digest"]),
        reused_tokens=int(facts.get("reused_tokens", 0)),
        reason=str(facts.get("reason") or ""),
    )
    _reference(found, 0)  # raises ValueError for numbers beyond the message's ranges
    return found
