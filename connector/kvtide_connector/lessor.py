"""The holder's rules: which blocks are held, for whom, until when, and who reads them.

Knows neither vLLM nor gRPC. Methods marked *scheduler thread* change the block pool; the others may run on any thread.
Times are nanoseconds of the injected clock. The states and transitions are in docs/leases.md.
"""

import threading
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence

from kvtide_connector.clock import Clock
from kvtide_connector.fingerprint import is_prefix, shared_blocks
from kvtide_connector.holds import BlockPool, Census, EndReason, Lease, Limits, Observer, Owner, Refusal, Ticket
from kvtide_connector.value import Worth


class Lessor:
    """Holds blocks under leases. The one place where a hold ends, and never while a ticket on it is open."""

    def __init__(
        self,
        pool: BlockPool,
        clock: Clock,
        limits: Limits,
        worth: Worth,
        new_id: Callable[[], str],
        observer: Observer,
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._limits = limits
        self._worth = worth
        self._new_id = new_id
        self._observer = observer
        self._lock = threading.RLock()
        self._leases: dict[str, Lease] = {}
        self._by_owner: dict[Owner, list[Lease]] = defaultdict(list)
        self._census = Census()
        self._ended: list[Lease] = []
        self._tickets: dict[str, Ticket] = {}
        self._used: OrderedDict[str, int] = OrderedDict()
        """Ids of tickets that are over, and until when a late repeat may still come."""
        self._epoch = 0
        self._due = 0
        """No live lease ends before this."""

    def grant(self, owner: Owner, turn: int, hashes: Sequence[bytes], block_ids: Sequence[int]) -> Lease:
        """Holds a finished turn and supersedes the leases that it extends. Scheduler thread.

        The lease may be over at once, when it is the least valuable beyond a limit. Raises ValueError when there is no
        block, or not one hash a block.
        """
        if not block_ids or len(hashes) != len(block_ids):
            raise ValueError(f"{len(block_ids)} blocks and {len(hashes)} hashes cannot be held")
        with self._lock:
            self._pool.pin(block_ids)
            extended = [lease for lease in self._by_owner[owner] if is_prefix(lease.hashes, hashes)]
            longest = max(extended, key=lambda lease: len(lease.hashes), default=None)
            lease = self._successor(longest, owner, turn, hashes, block_ids)
            lease.renewed = any(old.renewed for old in extended)
            for old in extended:
                self._end(old, EndReason.SUPERSEDED, continued=old is longest)
            self._add(lease)
            self._keep_limits(owner)
            self._collect(self._clock())
            return lease

    def renew(self, lease_id: str, ttl: int, epoch: int = 0) -> bool:
        """Moves a live lease's deadline to at least ``ttl`` from now; False when there is none to renew.

        ``ttl`` is cut to the longest that the holder grants. Epoch 0: whichever.
        """
        with self._lock:
            lease, now = self._leases.get(lease_id), self._clock()
            if lease is None or lease.deadline <= now or epoch not in (0, lease.epoch):
                return False
            span = min(ttl, self._limits.longest_ttl)
            lease.renewed = True
            if now + span > lease.deadline:
                lease.deadline, lease.granted_ttl = now + span, span
            self._observer.changed(lease)
            return True

    def release(self, lease_id: str, epoch: int = 0, reason: EndReason = EndReason.RELEASED) -> bool:
        """Ends a lease (epoch 0: whichever); its blocks are freed at the next step. False when it is not held."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None or epoch not in (0, lease.epoch):
                return False
            self._end(lease, reason)
            return True

    def ticket(
        self, ticket_id: str, attempt_id: str, owner: Owner, prompt_prefixes: bytes, duration: int
    ) -> Ticket | Refusal:
        """Promises the longest run of blocks that a lease of ``owner`` shares with the reader's prompt.

        ``prompt_prefixes`` is the first PREFIX_BYTES of each of the prompt's block hashes. A repeat of an open ticket
        by its attempt gets the same answer; a ticket that is over, or another attempt's, is refused.
        """
        with self._lock:
            known = self._tickets.get(ticket_id)
            if known is not None and known.attempt_id == attempt_id:
                return known
            if known is not None or ticket_id in self._used:
                answer: Ticket | Refusal = Refusal.USED
            else:
                answer = self._choose(ticket_id, attempt_id, owner, prompt_prefixes, duration)
            if isinstance(answer, Ticket):
                self._tickets[ticket_id] = answer
                answer.lease.tickets.add(ticket_id)
                answer.lease.last_used = self._clock()
            self._observer.ticketed(answer if isinstance(answer, Refusal) else None)
            return answer

    def end_ticket(self, ticket_id: str) -> None:
        """The reader is done. Unknown ids are fine: the ticket may have run out, or its end may come before its ask."""
        with self._lock:
            self._used[ticket_id] = self._clock() + self._limits.ticket_duration
            self._used.move_to_end(ticket_id)
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
            self._forget_used(now)

    def make_room(self, free_blocks: int) -> bool:
        """Evicts the leases of least value until ``free_blocks`` are free. Scheduler thread.

        True when something was freed. Leases with an open ticket stay.
        """
        with self._lock:
            before = self._pool.num_free()
            if before >= free_blocks:
                return False
            self._collect(self._clock())
            for lease in self._by_value(self._leases.values()):
                if self._pool.num_free() >= free_blocks:
                    break
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
            for ticket_id in list(self._tickets):
                self.end_ticket(ticket_id)

    def leases(self) -> list[Lease]:
        """The live leases."""
        with self._lock:
            return list(self._leases.values())

    def held_blocks(self) -> int:
        """Different blocks under leases, ended ones that a ticket still keeps included."""
        with self._lock:
            return self._census.blocks_with(self._ended)

    def _successor(
        self, longest: Lease | None, owner: Owner, turn: int, hashes: Sequence[bytes], block_ids: Sequence[int]
    ) -> Lease:
        """A lease that goes on where ``longest`` ended; its deadline is never the earlier one."""
        self._epoch += 1
        now = self._clock()
        deadline = max(now + self._limits.lease_ttl, longest.deadline if longest else 0)
        return Lease(
            lease_id=longest.lease_id if longest else self._new_id(),
            epoch=self._epoch,
            owner=owner,
            turn=turn,
            hashes=tuple(hashes),
            block_ids=tuple(block_ids),
            deadline=deadline,
            granted_ttl=deadline - now,
            last_used=now,
        )

    def _choose(
        self, ticket_id: str, attempt_id: str, owner: Owner, prefixes: bytes, duration: int
    ) -> Ticket | Refusal:
        now = self._clock()
        live = [lease for lease in self._by_owner.get(owner, ()) if lease.deadline > now]
        best = max(live, key=lambda lease: shared_blocks(lease.hashes, prefixes), default=None)
        count = shared_blocks(best.hashes, prefixes) if best else 0
        if best is None or count == 0:
            return Refusal.NOT_HELD
        until = now + min(duration, self._limits.ticket_duration)
        ticket = Ticket(ticket_id, attempt_id, best, count, until)
        return ticket if self._fits(ticket, now) else Refusal.TOO_MANY

    def _fits(self, ticket: Ticket, now: int) -> bool:
        covered = set(ticket.block_ids)
        for other in self._tickets.values():
            if other.deadline > now:
                covered.update(other.block_ids)
        return len(covered) <= self._pool.num_blocks() * self._limits.ticket_pool_share

    def _add(self, lease: Lease) -> None:
        siblings = self._by_owner[lease.owner]
        lease.own_blocks = _own(lease, siblings)
        self._leases[lease.lease_id] = lease
        siblings.append(lease)
        self._census.add(lease)
        self._due = min(self._due, lease.deadline)
        self._observer.granted(lease)

    def _end(self, lease: Lease, reason: EndReason, continued: bool = False) -> None:
        del self._leases[lease.lease_id]
        siblings = self._by_owner[lease.owner]
        siblings.remove(lease)
        self._census.remove(lease)
        self._ended.append(lease)
        self._observer.ended(lease, reason, continued)
        for i, sibling in enumerate(siblings):
            own = _own(sibling, siblings[:i])
            if own != sibling.own_blocks:
                sibling.own_blocks = own
                self._observer.changed(sibling)
        if not siblings:
            del self._by_owner[lease.owner]

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

    def _forget_used(self, now: int) -> None:
        while self._used and next(iter(self._used.values())) <= now:
            self._used.popitem(last=False)

    def _keep_limits(self, owner: Owner) -> None:
        limits = self._limits
        siblings = self._by_owner.get(owner, [])
        self._evict_while(lambda: len(siblings) > limits.leases_per_session, siblings)
        if limits.session_blocks:
            self._evict_while(lambda: sum(lease.own_blocks for lease in siblings) > limits.session_blocks, siblings)
        if limits.tenant_blocks and self._census.of_tenant(owner.tenant) > limits.tenant_blocks:
            mine = [lease for lease in self._leases.values() if lease.owner.tenant == owner.tenant]
            self._evict_while(lambda: self._census.of_tenant(owner.tenant) > limits.tenant_blocks, mine)

    def _evict_while(self, over: Callable[[], bool], leases: Iterable[Lease]) -> None:
        for lease in self._by_value(leases):
            if not over():
                return
            self._end(lease, EndReason.EVICTED)

    def _by_value(self, leases: Iterable[Lease]) -> list[Lease]:
        """Those without a ticket, the least valuable first; among equals the older grant."""
        now = self._clock()
        idle = [lease for lease in leases if not lease.tickets]
        return sorted(idle, key=lambda lease: (self._value(lease, now), lease.epoch))

    def _value(self, lease: Lease, now: int) -> float:
        others = [sibling for sibling in self._by_owner[lease.owner] if sibling is not lease]
        return self._worth.of(
            own_blocks=_own(lease, others),
            idle=now - lease.last_used,
            left=lease.deadline - now,
            granted_ttl=lease.granted_ttl,
            renewed=lease.renewed,
            tenant_share=self._census.share(lease.owner.tenant),
        )


def _own(lease: Lease, others: Iterable[Lease]) -> int:
    """Blocks of a lease that none of ``others`` holds too; what two leases share, they share from the front."""
    return len(lease.block_ids) - max((_shared_run(lease, other) for other in others), default=0)


def _shared_run(lease: Lease, other: Lease) -> int:
    mine, theirs = lease.block_ids, other.block_ids
    return bisect_left(range(min(len(mine), len(theirs))), True, key=lambda i: mine[i] != theirs[i])
