"""Gathers what a plan needs, within its time, and has it made."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_services.errors import NoDecodeEngine, StoreUnavailable
from kvtide_services.routing.choice import NONE, Known, Plan, Strategy, choose
from kvtide_services.routing.directory import EngineDirectory
from kvtide_services.store import Held, PlanStore


@dataclass(frozen=True)
class Wanted:
    """What is to be planned."""

    tenant: str
    model: str
    session_id: str = ""
    await_turn: int = 0
    force: Strategy = NONE
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Patience:
    """How long a plan waits for a lease that is about to be reported, and how often it looks, in seconds."""

    total: float
    poll: float
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(frozen=True)
class Policy:
    """What the settings say about strategies; ``threshold`` in tokens."""

    threshold: int
    forced: Strategy = NONE


class Planner(Protocol):
    """Turns requests into plans."""

    async def plan(self, wanted: Wanted) -> Plan:
        """Raises NoDecodeEngine."""

    async def models(self) -> list[str]:
        """Models that a decode engine serves."""


class Router:
    """A Planner. Without the store it plans without reuse."""

    def __init__(self, directory: EngineDirectory, store: PlanStore, patience: Patience, policy: Policy) -> None:
        self._directory = directory
        self._store = store
        self._patience = patience
        self._policy = policy

    async def plan(self, wanted: Wanted) -> Plan:
        """Raises NoDecodeEngine."""
        engines = [s for s in await self._directory.engines(wanted.model) if s.engine.name not in wanted.avoid]
        known = await self._known(wanted) if wanted.session_id else Known(named=False)
        plan = choose(engines, known, wanted.force or self._policy.forced, self._policy.threshold)
        if plan is None:
            raise NoDecodeEngine(wanted.model)
        return plan

    async def models(self) -> list[str]:
        """Models that a decode engine serves."""
        every = await self._directory.all()
        return sorted({s.engine.model for s in every if s.engine.role == pb.ENGINE_ROLE_DECODE})

    async def _known(self, wanted: Wanted) -> Known:
        try:
            held = await self._held(wanted)
        except StoreUnavailable:
            return Known(store_away=True)
        return Known(held.leases, held.turns)

    async def _held(self, wanted: Wanted) -> Held:
        """The client may be faster than the holder's report of the turn that just ended."""
        patience = self._patience
        deadline = patience.clock() + patience.total
        while True:
            held = await self._store.held(wanted.tenant, wanted.session_id)
            reported = not wanted.await_turn or any(lease.turn >= wanted.await_turn for lease in held.leases)
            if reported or patience.clock() >= deadline:
                return held
            await patience.sleep(patience.poll)
