"""Chooses strategy, engines and lease from what is known, and says why. Pure functions."""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvtide.lease.v1 import directive_pb2 as dpb
from kvtide.lease.v1 import lease_pb2 as pb

Strategy: TypeAlias = "dpb.Strategy.ValueType"
NONE = dpb.STRATEGY_UNSPECIFIED
DIRECT, REUSE = dpb.STRATEGY_DECODE_DIRECT, dpb.STRATEGY_PREFILL_REUSE
FRESH, ONLY = dpb.STRATEGY_PREFILL_FRESH, dpb.STRATEGY_DECODE_ONLY


class Why(enum.StrEnum):
    """What is known of a session's blocks."""

    HELD = "held"
    SHORT = "too_short"
    GONE = "engine_gone"
    NOTHING = "nothing_held"
    NO_SESSION = "no_session"
    STORE_AWAY = "store_away"


@dataclass(frozen=True)
class Known:
    """What the store said about a session."""

    leases: tuple[pb.Lease, ...] = ()
    turns: int = 0
    named: bool = True
    store_away: bool = False

    @property
    def next_turn(self) -> int:
        """Counts from 1."""
        return max([self.turns, *(lease.turn for lease in self.leases)]) + 1


@dataclass(frozen=True)
class Plan:
    """How a turn runs. ``why`` is the kind of ``reason``, for counters."""

    strategy: Strategy
    reason: str
    why: Why
    decode: pb.EngineStatus
    prefill: pb.EngineStatus | None
    lease: pb.Lease | None
    turn: int


@dataclass(frozen=True)
class _Reuse:
    """The lease worth using, if any, the engine that the session was on, and what to say about it."""

    lease: pb.Lease | None
    decode: pb.EngineStatus | None
    why: Why
    words: str


def choose(engines: Sequence[pb.EngineStatus], known: Known, forced: Strategy, threshold: int) -> Plan | None:
    """None when there is no decode engine. ``threshold``: tokens below which a lease is not worth reading."""
    decodes = [s for s in engines if s.engine.role == pb.ENGINE_ROLE_DECODE]
    prefills = [s for s in engines if s.engine.role == pb.ENGINE_ROLE_PREFILL]
    if not decodes:
        return None
    # What D holds costs nothing to use in place; only reading it must be worth it.
    reuse = _reuse(known, decodes, 1 if forced == DIRECT else threshold)
    decode = reuse.decode or _least_loaded(_pairable(decodes, prefills)) or _least_loaded(decodes)
    if decode is None:
        return None
    prefill = _least_loaded(_pairs_of(decode, prefills))
    strategy = _first_possible(forced, reuse.lease is not None, prefill is not None)
    return Plan(
        strategy=strategy,
        reason=_reason(forced, strategy, prefill is not None, reuse.words),
        why=reuse.why,
        decode=decode,
        prefill=prefill if strategy in (REUSE, FRESH) else None,
        lease=reuse.lease if strategy in (DIRECT, REUSE) else None,
        turn=known.next_turn,
    )


def _first_possible(forced: Strategy, lease: bool, prefill: bool) -> Strategy:
    """The first rung of the ladder, from the forced one (else PREFILL_REUSE) down, that can be done."""
    possible = {DIRECT: lease, REUSE: lease and prefill, FRESH: prefill, ONLY: True}
    ladder = (DIRECT, REUSE, FRESH, ONLY)
    rungs = ladder[ladder.index(forced or REUSE) :]
    return next(rung for rung in rungs if possible[rung])


def _reuse(known: Known, decodes: Sequence[pb.EngineStatus], threshold: int) -> _Reuse:
    alive = {(s.engine.name, s.engine.boot_id): s for s in decodes}
    live = [lease for lease in known.leases if (lease.engine, lease.boot_id) in alive]
    best = _latest(lease for lease in live if lease.num_tokens >= threshold)
    there = best or _latest(live)
    decode = alive[there.engine, there.boot_id] if there else None
    why = _why(known, best, there)
    return _Reuse(best, decode, why, _words(why, there, threshold))


def _why(known: Known, best: pb.Lease | None, there: pb.Lease | None) -> Why:
    if not known.named:
        return Why.NO_SESSION
    if known.store_away:
        return Why.STORE_AWAY
    if best is not None:
        return Why.HELD
    if there is not None:
        return Why.SHORT
    return Why.GONE if known.leases else Why.NOTHING


def _words(why: Why, lease: pb.Lease | None, threshold: int) -> str:
    if lease is not None:
        held = f"D {lease.engine} holds {lease.num_tokens:,} tokens of this session (turn {lease.turn})"
        return held if why is Why.HELD else f"{held}, fewer than {threshold:,}"
    return {
        Why.NO_SESSION: "the request names no session",
        Why.STORE_AWAY: "the store does not answer",
        Why.GONE: "the engine that held this session is gone or to be avoided",
    }.get(why, "nothing of this session is held")


def _reason(forced: Strategy, strategy: Strategy, prefill: bool, words: str) -> str:
    parts = [] if prefill or strategy == DIRECT or forced == ONLY else ["no prefill engine can be paired"]
    if forced == strategy:
        parts.insert(0, "forced")
    elif forced != NONE:
        name = dpb.Strategy.Name(forced).removeprefix("STRATEGY_")
        parts.insert(0, f"forced {name} cannot be done")
    return "; ".join([*parts, words])


def _latest(leases: Iterable[pb.Lease]) -> pb.Lease | None:
    """The latest turn's; of equal ones the longest."""
    return max(leases, key=lambda lease: (lease.turn, lease.num_tokens), default=None)


def _pairs_of(decode: pb.EngineStatus, prefills: Sequence[pb.EngineStatus]) -> list[pb.EngineStatus]:
    return [p for p in prefills if p.engine.pairing_digest == decode.engine.pairing_digest]


def _pairable(decodes: Sequence[pb.EngineStatus], prefills: Sequence[pb.EngineStatus]) -> list[pb.EngineStatus]:
    return [d for d in decodes if _pairs_of(d, prefills)]


def _least_loaded(statuses: Iterable[pb.EngineStatus]) -> pb.EngineStatus | None:
    return min(statuses, key=_load, default=None)


def _load(status: pb.EngineStatus) -> tuple[int, str]:
    return status.beat.running_requests + status.beat.waiting_requests, status.engine.name
