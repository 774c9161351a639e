"""What a holder keeps: leases, tickets, and the words for how they end. Times are nanoseconds of the holder's clock."""

import enum
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class BlockPool(Protocol):
    """The part of an engine's KV block pool that holds need."""

    def pin(self, block_ids: Sequence[int]) -> None:
        """Adds a reference to each block."""

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Drops a reference from each block; at none left it is free."""

    def num_free(self) -> int: ...

    def num_blocks(self) -> int: ...


class EndReason(enum.Enum):
    """What ended a lease."""

    SUPERSEDED = "superseded"
    RELEASED = "released"
    EXPIRED = "expired"
    EVICTED = "evicted"
    LOST = "lost"


class Refusal(enum.Enum):
    """Why a ticket was not given."""

    NOT_HELD = "not held"
    RESTARTED = "restarted"
    TOO_MANY = "too many tickets"
    UNREACHABLE = "unreachable"
    USED = "the ticket was another attempt's"


@dataclass(frozen=True)
class Owner:
    """A session of a tenant."""

    tenant: str
    session_id: str


@dataclass
class Lease:
    """A hold with a name. ``hashes[i]`` is the chained hash of ``block_ids[i]``, from the first of the prompt on."""

    lease_id: str
    epoch: int
    owner: Owner
    turn: int
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    deadline: int
    granted_ttl: int
    last_used: int
    renewed: bool = False
    """A client asked for more time: it means to come back."""
    own_blocks: int = 0
    """Blocks that no sibling granted earlier holds too."""
    tickets: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Ticket:
    """A promise to one attempt not to free ``block_ids`` until ``deadline``."""

    ticket_id: str
    attempt_id: str
    lease: Lease
    num_blocks: int
    deadline: int

    @property
    def block_ids(self) -> tuple[int, ...]:
        return self.lease.block_ids[: self.num_blocks]

    @property
    def hashes(self) -> tuple[bytes, ...]:
        return self.lease.hashes[: self.num_blocks]


@dataclass(frozen=True)
class Limits:
    """What the holder promises at most; durations in nanoseconds, holds in blocks, 0 for no limit of that kind."""

    lease_ttl: int
    longest_ttl: int
    ticket_duration: int
    ticket_pool_share: float
    leases_per_session: int
    session_blocks: int = 0
    tenant_blocks: int = 0


class Observer(Protocol):
    """Told of every transition, on the thread that made it, with the rules' lock held: it must not block."""

    def granted(self, lease: Lease) -> None: ...

    def changed(self, lease: Lease) -> None:
        """Renewed, or it now has blocks for itself that it shared before."""

    def ended(self, lease: Lease, reason: EndReason, continued: bool) -> None:
        """``continued``: a lease of the same id and a higher epoch takes over."""

    def ticketed(self, refusal: Refusal | None) -> None: ...


class Census:
    """How many different blocks are held, in all and by tenant; shared ones count once."""

    def __init__(self) -> None:
        self._all: Counter[int] = Counter()
        self._tenants: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def add(self, lease: Lease) -> None:
        """A lease took its blocks."""
        self._all.update(lease.block_ids)
        self._tenants[lease.owner.tenant].update(lease.block_ids)

    def remove(self, lease: Lease) -> None:
        """A lease let go of them."""
        tenant = lease.owner.tenant
        for counter in (self._all, self._tenants[tenant]):
            for block_id in lease.block_ids:
                counter[block_id] -= 1
                if not counter[block_id]:
                    del counter[block_id]
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    def blocks(self) -> int:
        """Held in all."""
        return len(self._all)

    def blocks_with(self, leases: Iterable[Lease]) -> int:
        """Held in all when these leases, which are not counted, are too."""
        return len(self._all) + len({i for lease in leases for i in lease.block_ids if i not in self._all})

    def of_tenant(self, tenant: str) -> int:
        """Held for a tenant."""
        return len(self._tenants[tenant]) if tenant in self._tenants else 0

    def share(self, tenant: str) -> float:
        """A tenant's part of what is held, 0 to 1."""
        return self.of_tenant(tenant) / len(self._all) if self._all else 0.0
