"""What a turn is to do, in the gateway's own terms."""

import dataclasses
from dataclasses import dataclass

from kvtide_gateway.strategy import Strategy


@dataclass(frozen=True)
class PlannedEngine:
    """An engine as it was when the plan was made."""

    name: str
    boot_id: str
    url: str
    clock_stamp: int = 0
    """The engine's own latest clock reading; its unit is the engine's."""


@dataclass(frozen=True)
class Lease:
    """D's blocks, by their fencing token."""

    lease_id: str
    epoch: int
    engine: str
    boot_id: str


@dataclass(frozen=True)
class Plan:
    """One way to run one turn."""

    strategy: Strategy
    reason: str
    decode: PlannedEngine
    prefill: PlannedEngine | None = None
    lease: Lease | None = None
    lease_tokens: int = 0
    turn: int = 1

    def at_most(self, limit: Strategy, reason: str = "") -> "Plan":
        """The same engines at ``limit`` or the first rung below it that they can do."""
        strategy = max(self.strategy, limit, key=lambda rung: rung.rank)
        while not self._can(strategy):
            strategy = strategy.below
        return dataclasses.replace(self, strategy=strategy, reason=reason or self.reason)

    def _can(self, strategy: Strategy) -> bool:
        lacks_prefill = strategy.uses_prefill and self.prefill is None
        return not lacks_prefill and not (strategy.uses_lease and self.lease is None)


@dataclass(frozen=True)
class Ask:
    """What is to be planned."""

    tenant: str
    model: str
    session_id: str = ""
    force: Strategy | None = None
    avoid: frozenset[str] = frozenset()
    """Names of engines that failed."""
