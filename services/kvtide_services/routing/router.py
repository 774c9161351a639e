"""Chooses strategy, engines and lease for one turn, and says why. Rules only."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

from kvtide.lease.v1 import directive_pb2 as dpb
from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_services.errors import NoDecodeEngine, StoreUnavailable
from kvtide_services.routing.directory import EngineDirectory, Statuses
from kvtide_services.store import LeaseStore, SessionStore

DIRECT, REUSE = dpb.STRATEGY_DECODE_DIRECT, dpb.STRATEGY_PREFILL_REUSE
FRESH, ONLY = dpb.STRATEGY_PREFILL_FRESH, dpb.STRATEGY_DECODE_ONLY
_POLL = 0.003


@dataclass(frozen=True)
class Wanted:
    """What is to be planned."""

    tenant: str
    model: str
    session_id: str = ""
    await_turn: int = 0
    force: "dpb.Strategy.ValueType" = dpb.STRATEGY_UNSPECIFIED
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Known:
    """What the store said about a session."""

    leases: tuple[pb.Lease, ...] = ()
    turns: int = 0
    store_away: bool = False

    @property
    def next_turn(self) -> int:
        return max([self.turns, *(lease.turn for lease in self.leases)]) + 1


@dataclass(frozen=True)
class Plan:
    """How a turn runs."""

    strategy: "dpb.Strategy.ValueType"
    reason: str
    decode: pb.EngineStatus
    prefill: pb.EngineStatus | None
    lease: pb.Lease | None
    turn: int


class Router:
    """Plans turns. Without the store it plans without reuse."""

    def __init__(
        self,
        directory: EngineDirectory,
        leases: LeaseStore,
        sessions: SessionStore,
        clock: Callable[[], float],
        patience: timedelta,
        threshold: int,
        forced: "dpb.Strategy.ValueType",
    ) -> None:
        """``patience``: how long a plan waits for a lease that is about to be reported; ``threshold`` in tokens."""
        self._directory = directory
        self._leases = leases
        self._sessions = sessions
        self._clock = clock
        self._patience = patience.total_seconds()
        self._threshold = threshold
        self._forced = forced

    async def plan(self, wanted: Wanted) -> Plan:
        """Raises NoDecodeEngine."""
        engines = [s for s in await self._directory.engines(wanted.model) if s.engine.name not in wanted.avoid]
        decodes = [s for s in engines if s.engine.role == pb.ENGINE_ROLE_DECODE]
        if not decodes:
            raise NoDecodeEngine(wanted.model)
        known = await self._known(wanted) if wanted.session_id else Known()
        return self._choose(wanted, engines, decodes, known)

    async def models(self) -> list[str]:
        """Models that a decode engine serves."""
        every = await self._directory.all()
        return sorted({s.engine.model for s in every if s.engine.role == pb.ENGINE_ROLE_DECODE})

    async def _known(self, wanted: Wanted) -> Known:
        try:
            leases = await self._fresh_leases(wanted)
            record = await self._sessions.get(wanted.tenant, wanted.session_id)
        except StoreUnavailable:
            return Known(store_away=True)
        return Known(tuple(leases), record.turns if record else 0)

    async def _fresh_leases(self, wanted: Wanted) -> list[pb.Lease]:
        """The client may be faster than the holder's report of the turn that just ended."""
        deadline = self._clock() + self._patience
        while True:
            leases = await self._leases.leases(wanted.tenant, wanted.session_id)
            if not wanted.await_turn or any(e.turn >= wanted.await_turn for e in leases):
                return leases
            if self._clock() >= deadline:
                return leases
            await asyncio.sleep(_POLL)

    def _choose(self, wanted: Wanted, engines: Statuses, decodes: Statuses, known: Known) -> Plan:
        worth = [lease for lease in known.leases if lease.num_tokens >= self._threshold]
        lease, decode = _best_lease(worth, decodes)
        decode = decode or _least_loaded(decodes)
        prefills = [s for s in engines if s.engine.role == pb.ENGINE_ROLE_PREFILL]
        prefill = _least_loaded_of(p for p in prefills if p.engine.pairing_digest == decode.engine.pairing_digest)
        forced = wanted.force or self._forced
        strategy, reason = self._strategy(forced, lease, prefill, known)
        uses_lease = strategy in (DIRECT, REUSE)
        return Plan(
            strategy=strategy,
            reason=reason,
            decode=decode,
            prefill=prefill if strategy in (REUSE, FRESH) else None,
            lease=lease if uses_lease else None,
            turn=known.next_turn,
        )

    def _strategy(
        self, forced: "dpb.Strategy.ValueType", lease: pb.Lease | None, prefill: pb.EngineStatus | None, known: Known
    ) -> tuple["dpb.Strategy.ValueType", str]:
        """The first rung of the ladder, from the forced or the best one down, that can be done."""
        holds = self._holding(lease, known)
        if forced == DIRECT and lease is not None:
            return DIRECT, f"forced; {holds}"
        if forced in (DIRECT, REUSE, dpb.STRATEGY_UNSPECIFIED) and lease is not None and prefill is not None:
            return REUSE, holds if not forced else f"forced; {holds}"
        if forced != ONLY and prefill is not None:
            return FRESH, holds if forced != FRESH else "forced"
        return ONLY, "forced" if forced == ONLY else f"no prefill engine can be paired; {holds}"

    def _holding(self, lease: pb.Lease | None, known: Known) -> str:
        if known.store_away:
            return "the store does not answer"
        if lease is None:
            return "nothing of this session is held"
        return f"{lease.engine} holds {lease.num_tokens} tokens of this session (turn {lease.turn})"


def _best_lease(leases: Iterable[pb.Lease], decodes: Statuses) -> tuple[pb.Lease | None, pb.EngineStatus | None]:
    """The latest turn's lease on an engine that has not restarted since; of equal ones the longest."""
    alive = {(s.engine.name, s.engine.boot_id): s for s in decodes}
    live = [lease for lease in leases if (lease.engine, lease.boot_id) in alive]
    best = max(live, key=lambda lease: (lease.turn, lease.num_tokens), default=None)
    return best, alive[best.engine, best.boot_id] if best else None


def _load(status: pb.EngineStatus) -> tuple[int, str]:
    return status.beat.running_requests + status.beat.waiting_requests, status.engine.name


def _least_loaded(statuses: Statuses) -> pb.EngineStatus:
    return min(statuses, key=_load)


def _least_loaded_of(statuses: Iterable[pb.EngineStatus]) -> pb.EngineStatus | None:
    return min(statuses, key=_load, default=None)
