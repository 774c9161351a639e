"""The holder's rules: which blocks are held, for whom, until when, and who reads them.

Knows neither vLLM nor gRPC. Methods marked *scheduler thread* change the block pool; the others may run on any thread.
Times are nanoseconds of the injected clock.
"""

import enum
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtide_connector.clock import Clock

PREFIX_BYTES = 8
"""Bytes of each block hash that a reader sends to choose a lease by."""


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
    last_used: int
    tickets: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Ticket:
    """A promise not to free ``block_ids`` until ``deadline``."""

    ticket_id: str
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
    """What the holder promises at most; durations in nanoseconds."""

    lease_ttl: int
    ticket_duration: int
    ticket_pool_share: float
    leases_per_session: int


class Observer(Protocol):
    """Told of every transition, on the thread that made it, with the rules' lock held: it must not block."""

    def granted(self, lease: Lease) -> None: ...

    def ended(self, lease: Lease, reason: EndReason, continued: bool) -> None:
        """``continued``: a lease of the same id and a higher epoch takes over."""

    def ticketed(self, refusal: Refusal | None) -> None: ...


class Lessor:
    """Holds blocks under leases. The one place where a hold ends, and never while a ticket on it is open."""

    def __init__(
        self, pool: BlockPool, clock: Clock, limits: Limits, new_id: Callable[[], str], observer: Observer
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._limits = limits
        self._new_id = new_id
        self._observer = observer
        self._lock = threading.RLock()
        self._leases: dict[str, Lease] = {}
        self._by_owner: dict[Owner, list[Lease]] = defaultdict(list)
        self._ended: list[Lease] = []
        self._tickets: dict[str, Ticket] = {}
        self._epoch = 0
        self._due = 0
        """No live lease ends before this."""

    def grant(self, owner: Owner, turn: int, hashes: Sequence[bytes], block_ids: Sequence[int]) -> Lease:
        """Holds a finished turn and supersedes the leases that it extends. Scheduler thread.

        Raises ValueError when there is no block, or not one hash a block.
        """
        if not block_ids or len(hashes) != len(block_ids):
            raise ValueError(f"{len(block_ids)} blocks and {len(hashes)} hashes cannot be held")
        with self._lock:
            self._pool.pin(block_ids)
            extended = [lease for lease in self._by_owner[owner] if _is_prefix(lease.hashes, hashes)]
            longest = max(extended, key=lambda lease: len(lease.hashes), default=None)
            self._epoch += 1
            now = self._clock()
            lease = Lease(
                lease_id=longest.lease_id if longest else self._new_id(),
                epoch=self._epoch,
                owner=owner,
                turn=turn,
                hashes=tuple(hashes),
                block_ids=tuple(block_ids),
                deadline=now + self._limits.lease_ttl,
                last_used=now,
            )
            for old in extended:
                self._end(old, EndReason.SUPERSEDED, continued=old is longest)
            self._leases[lease.lease_id] = lease
            self._by_owner[owner].append(lease)
            self._due = min(self._due, lease.deadline)
            self._observer.granted(lease)
            self._keep_branch_limit(owner)
            self._collect(now)
            return lease

    def renew(self, lease_id: str, ttl: int) -> bool:
        """Moves a live lease's deadline to at least ``ttl`` from now; False when there is none to renew."""
        with self._lock:
            lease, now = self._leases.get(lease_id), self._clock()
            if lease is None or lease.deadline <= now:
                return False
            lease.deadline = max(lease.deadline, now + ttl)
            return True

    def release(self, lease_id: str, epoch: int = 0, reason: EndReason = EndReason.RELEASED) -> bool:
        """Ends a lease (epoch 0: whichever); its blocks are freed at the next step. False when it is not held."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None or epoch not in (0, lease.epoch):
                return False
            self._end(lease, reason)
            return True

    def ticket(self, ticket_id: str, owner: Owner, prompt_prefixes: bytes, duration: int) -> Ticket | Refusal:
        """Promises the longest run of blocks that a lease of ``owner`` shares with the reader's prompt.

        ``prompt_prefixes`` is the first PREFIX_BYTES of each of the prompt's block hashes. A repeated id gets the same
        answer.
        """
        with self._lock:
            known = self._tickets.get(ticket_id)
            if known is not None:
                return known
            answer = self._choose(ticket_id, owner, prompt_prefixes, duration)
            if isinstance(answer, Ticket):
                self._tickets[ticket_id] = answer
                answer.lease.tickets.add(ticket_id)
                answer.lease.last_used = self._clock()
            self._observer.ticketed(answer if isinstance(answer, Refusal) else None)
            return answer

    def end_ticket(self, ticket_id: str) -> None:
        """The reader is done. Unknown ids are fine: the ticket may have run out."""
        with self._lock:
            ticket = self._tickets.pop(ticket_id, None)
            if ticket is not None:
                ticket.lease.tickets.discard(ticket_id)

    def step(self) -> None:
        """Ends what is due and frees what has ended. Scheduler thread."""
        with self._lock:
            now = self._clock()
            if self._leases and self._due <= now:
                for lease in [lease for lease in self._leases.values() if lease.deadline <= now]:
                    self._end(lease, EndReason.EXPIRED)
                self._due = min((lease.deadline for lease in self._leases.values()), default=now)
            if self._ended:
                self._collect(now)

    def make_room(self, free_blocks: int) -> bool:
        """Evicts the least recently used leases until ``free_blocks`` are free. Scheduler thread.

        True when something was freed. Leases with an open ticket stay.
        """
        with self._lock:
            before = self._pool.num_free()
            if before >= free_blocks:
                return False
            self._collect(self._clock())
            for lease in sorted(self._leases.values(), key=lambda lease: lease.last_used):
                if self._pool.num_free() >= free_blocks:
                    break
                if not lease.tickets:
                    self._end(lease, EndReason.EVICTED)
                    self._collect(self._clock())
            return self._pool.num_free() > before

    def reset(self) -> None:
        """Ends every lease, tickets or not: the KV is about to be worthless. Scheduler thread."""
        with self._lock:
            for lease in list(self._leases.values()):
                self._end(lease, EndReason.LOST)
            for lease in self._ended:
                self._pool.unpin(lease.block_ids)
            self._ended.clear()
            self._tickets.clear()

    def leases(self) -> list[Lease]:
        """The live leases."""
        with self._lock:
            return list(self._leases.values())

    def held_blocks(self) -> int:
        """Different blocks under leases, ended ones that a ticket still keeps included."""
        with self._lock:
            return len({b for lease in (*self._leases.values(), *self._ended) for b in lease.block_ids})

    def _choose(self, ticket_id: str, owner: Owner, prefixes: bytes, duration: int) -> Ticket | Refusal:
        now = self._clock()
        live = [lease for lease in self._by_owner.get(owner, ()) if lease.deadline > now]
        best = max(live, key=lambda lease: _shared(lease.hashes, prefixes), default=None)
        count = _shared(best.hashes, prefixes) if best else 0
        if best is None or count == 0:
            return Refusal.NOT_HELD
        ticket = Ticket(ticket_id, best, count, now + min(duration, self._limits.ticket_duration))
        return ticket if self._fits(ticket, now) else Refusal.TOO_MANY

    def _fits(self, ticket: Ticket, now: int) -> bool:
        covered = set(ticket.block_ids)
        for other in self._tickets.values():
            if other.deadline > now:
                covered.update(other.block_ids)
        return len(covered) <= self._pool.num_blocks() * self._limits.ticket_pool_share

    def _end(self, lease: Lease, reason: EndReason, continued: bool = False) -> None:
        del self._leases[lease.lease_id]
        siblings = self._by_owner[lease.owner]
        siblings.remove(lease)
        if not siblings:
            del self._by_owner[lease.owner]
        self._ended.append(lease)
        self._observer.ended(lease, reason, continued)

    def _collect(self, now: int) -> None:
        """Frees ended leases whose tickets are over."""
        for ticket in [ticket for ticket in self._tickets.values() if ticket.deadline <= now]:
            self.end_ticket(ticket.ticket_id)
        kept = []
        for lease in self._ended:
            if lease.tickets:
                kept.append(lease)
            else:
                self._pool.unpin(lease.block_ids)
        self._ended = kept

    def _keep_branch_limit(self, owner: Owner) -> None:
        branches = sorted(self._by_owner[owner], key=lambda lease: lease.last_used)
        for lease in branches[: max(0, len(branches) - self._limits.leases_per_session)]:
            self._end(lease, EndReason.EVICTED)


def _is_prefix(old: Sequence[bytes], new: Sequence[bytes]) -> bool:
    """Hashes are chained, so equal ones at one place mean equal runs up to it."""
    return len(old) <= len(new) and old[-1] == new[len(old) - 1]


def _shared(hashes: Sequence[bytes], prefixes: bytes) -> int:
    count = 0
    for i, block_hash in enumerate(hashes):
        if block_hash[:PREFIX_BYTES] != prefixes[i * PREFIX_BYTES : (i + 1) * PREFIX_BYTES]:
            break
        count += 1
    return count


def common_blocks(hashes: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Blocks that two fingerprints share from the start, compared in full."""
    count = 0
    for mine, theirs in zip(hashes, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def hash_prefixes(hashes: Iterable[bytes]) -> bytes:
    """What a reader sends of its prompt's block hashes."""
    return b"".join(bytes(block_hash[:PREFIX_BYTES]) for block_hash in hashes)
