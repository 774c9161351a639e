"""The holder's rules, on a pool of reference counts and a clock that the tests turn."""

from collections import Counter
from collections.abc import Sequence
from itertools import count

import pytest

from kvtide_connector.fingerprint import hash_prefixes
from kvtide_connector.holds import EndReason, Lease, Limits, Owner, Refusal, Ticket
from kvtide_connector.lessor import Lessor
from kvtide_connector.value import Worth

OWNER = Owner("acme", "s1")
OTHER = Owner("acme", "s2")


class CountedPool:
    def __init__(self, blocks: int) -> None:
        self.references: Counter[int] = Counter()
        self.blocks = blocks

    def pin(self, block_ids: Sequence[int]) -> None:
        self.references.update(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        self.references.subtract(block_ids)
        assert min(self.references.values(), default=0) >= 0, "a block was freed twice"

    def num_free(self) -> int:
        return self.blocks - sum(1 for references in self.references.values() if references)

    def num_blocks(self) -> int:
        return self.blocks


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def granted(self, lease: Lease) -> None:
        self.lines.append(("granted", lease.lease_id))

    def changed(self, lease: Lease) -> None:
        self.lines.append(("changed", lease.lease_id))

    def ended(self, lease: Lease, reason: EndReason, continued: bool) -> None:
        self.lines.append((reason.value + (" continued" if continued else ""), lease.lease_id))

    def ticketed(self, refusal: Refusal | None) -> None:
        self.lines.append(("ticket", refusal.value if refusal else "given"))


class World:
    def __init__(self, blocks: int = 100, branches: int = 8, session: int = 0, tenant: int = 0) -> None:
        self.now = 0
        self.pool = CountedPool(blocks)
        self.log = Log()
        ids = count(1)
        limits = Limits(
            lease_ttl=120,
            longest_ttl=1000,
            ticket_duration=30,
            ticket_pool_share=0.5,
            leases_per_session=branches,
            session_blocks=session,
            tenant_blocks=tenant,
        )
        worth = Worth(half_life=60, long_blocks=1000)
        self.lessor = Lessor(self.pool, lambda: self.now, limits, worth, lambda: f"lease-{next(ids)}", self.log)

    def hold(self, text: str, first_block: int = 0, owner: Owner = OWNER, turn: int = 1) -> Lease:
        return self.lessor.grant(owner, turn, fingerprint(text), range(first_block, first_block + len(text)))

    def ask(
        self, text: str, ticket: str = "t1", owner: Owner = OWNER, duration: int = 30, attempt: str = "a1"
    ) -> Ticket | Refusal:
        return self.lessor.ticket(ticket, attempt, owner, hash_prefixes(fingerprint(text)), duration)


def fingerprint(text: str) -> list[bytes]:
    """One block a letter, chained: equal only after equal beginnings."""
    return [f"{text[: i + 1]!s:_<32}"[::-1].encode()[-32:].rjust(32, b"_")[::-1] for i in range(len(text))]


def given(answer: Ticket | Refusal) -> Ticket:
    assert isinstance(answer, Ticket), answer
    return answer


def test_fingerprints_of_these_tests_are_chained() -> None:
    assert fingerprint("abc")[1] == fingerprint("abd")[1]
    assert fingerprint("abc")[2] != fingerprint("xbc")[2]
    assert hash_prefixes(fingerprint("abc")) != hash_prefixes(fingerprint("xbc"))


def test_a_grant_references_each_block_once_and_reports() -> None:
    world = World()
    lease = world.hold("abc", first_block=10)
    assert world.pool.references == Counter({10: 1, 11: 1, 12: 1})
    assert (lease.epoch, lease.deadline) == (1, 120)
    assert world.log.lines == [("granted", lease.lease_id)]


@pytest.mark.parametrize(("hashes", "blocks"), [([], []), (["x"], [1, 2])])
def test_a_grant_without_blocks_or_with_other_counts_is_refused(hashes: list[str], blocks: list[int]) -> None:
    world = World()
    with pytest.raises(ValueError, match="cannot be held"):
        world.lessor.grant(OWNER, 1, [h.encode() for h in hashes], blocks)
    assert world.pool.num_free() == 100


def test_an_extension_keeps_the_branch_id_raises_the_epoch_and_frees_the_predecessor() -> None:
    world = World()
    first = world.hold("ab", first_block=0)
    second = world.hold("abc", first_block=20)
    assert second.lease_id == first.lease_id
    assert second.epoch > first.epoch
    assert world.pool.num_free() == 97
    assert ("superseded continued", first.lease_id) in world.log.lines


def test_blocks_shared_by_predecessor_and_successor_stay_held() -> None:
    world = World()
    world.hold("ab", first_block=0)
    world.hold("abc", first_block=0)
    assert +world.pool.references == Counter({0: 1, 1: 1, 2: 1})


def test_another_branch_is_not_superseded_and_each_prompt_finds_its_own() -> None:
    world = World()
    world.hold("abX", first_block=0)
    world.hold("abY", first_block=10)
    assert given(world.ask("abXnew")).block_ids == (0, 1, 2)
    assert given(world.ask("abYnew", "t2")).block_ids == (10, 11, 12)


def test_a_longer_hold_supersedes_every_branch_it_extends() -> None:
    world = World()
    world.hold("abc", first_block=0)
    shorter = world.hold("a", first_block=10)
    world.hold("abcd", first_block=20)
    assert [lease.block_ids for lease in world.lessor.leases()] == [(20, 21, 22, 23)]
    assert ("superseded", shorter.lease_id) in world.log.lines


def test_a_ticket_covers_the_blocks_shared_from_the_front_only() -> None:
    world = World()
    world.hold("abcd", first_block=5)
    ticket = given(world.ask("abXd"))
    assert ticket.block_ids == (5, 6)
    assert ticket.hashes == tuple(fingerprint("abcd")[:2])


def test_nothing_shared_is_refused_and_so_is_another_owner() -> None:
    world = World()
    world.hold("abc")
    assert world.ask("xyz") is Refusal.NOT_HELD
    assert world.ask("abc", owner=OTHER) is Refusal.NOT_HELD
    assert world.ask("abc", owner=Owner("evil", "s1")) is Refusal.NOT_HELD


def test_a_lease_may_be_read_many_times() -> None:
    world = World()
    world.hold("abc")
    for attempt in range(5):
        assert given(world.ask("abcd", f"t{attempt}")).num_blocks == 3
        world.lessor.end_ticket(f"t{attempt}")
    assert world.pool.num_free() == 97


def test_the_same_ticket_id_gets_the_same_answer() -> None:
    world = World()
    world.hold("abc")
    first = given(world.ask("abc"))
    world.now = 5
    assert world.ask("abc") is first
    assert first.deadline == 30


@pytest.mark.parametrize("end", ["release", "expire", "supersede"])
def test_blocks_under_an_open_ticket_are_not_freed(end: str) -> None:
    world = World()
    lease = world.hold("abc", first_block=0)
    world.now = 100
    given(world.ask("abcd"))
    if end == "release":
        assert world.lessor.release(lease.lease_id)
    elif end == "expire":
        world.now = 125
    else:
        world.hold("abcd", first_block=50)
    world.lessor.step()
    assert [world.pool.references[block] for block in (0, 1, 2)] == [1, 1, 1]
    world.lessor.end_ticket("t1")
    world.lessor.step()
    assert [world.pool.references[block] for block in (0, 1, 2)] == [0, 0, 0]


def test_a_dead_reader_is_waited_for_no_longer_than_the_ticket() -> None:
    world = World()
    lease = world.hold("abc")
    given(world.ask("abc"))
    world.lessor.release(lease.lease_id)
    world.now = 29
    world.lessor.step()
    assert world.pool.num_free() == 97
    world.now = 30
    world.lessor.step()
    assert world.pool.num_free() == 100


def test_an_ended_lease_gives_no_ticket() -> None:
    world = World()
    lease = world.hold("abc")
    world.lessor.release(lease.lease_id)
    assert world.ask("abc") is Refusal.NOT_HELD


def test_a_lease_past_its_deadline_gives_no_ticket_even_before_a_step_ends_it() -> None:
    world = World()
    world.hold("abc")
    world.now = 120
    assert world.ask("abc") is Refusal.NOT_HELD


def test_a_ticket_is_never_longer_than_the_holder_allows() -> None:
    world = World()
    world.hold("abc")
    assert given(world.ask("abc", duration=1000)).deadline == 30
    assert given(world.ask("abc", "t2", duration=5)).deadline == 5


def test_tickets_cover_at_most_half_the_pool() -> None:
    world = World(blocks=10)
    world.hold("abc", first_block=0)
    world.hold("uvw", first_block=3, owner=OTHER)
    given(world.ask("abc", "t1"))
    assert world.ask("uvw", "t2", owner=OTHER) is Refusal.TOO_MANY
    given(world.ask("abc", "t3"))
    world.now = 30
    assert given(world.ask("uvw", "t4", owner=OTHER)).num_blocks == 3


def test_renewal_extends_but_never_shortens_and_never_resurrects() -> None:
    world = World()
    lease = world.hold("abc")
    assert world.lessor.renew(lease.lease_id, 10)
    assert lease.deadline == 120
    world.now = 60
    assert world.lessor.renew(lease.lease_id, 120)
    assert lease.deadline == 180
    world.now = 180
    assert not world.lessor.renew(lease.lease_id, 120)
    assert not world.lessor.renew("unknown", 120)


def test_release_with_a_stale_epoch_changes_nothing() -> None:
    world = World()
    first = world.hold("ab")
    world.hold("abc", first_block=10)
    assert not world.lessor.release(first.lease_id, epoch=first.epoch)
    assert len(world.lessor.leases()) == 1


def test_expiry_frees_at_the_next_step() -> None:
    world = World()
    lease = world.hold("abc")
    world.now = 119
    world.lessor.step()
    assert world.pool.num_free() == 97
    world.now = 120
    world.lessor.step()
    assert world.pool.num_free() == 100
    assert world.log.lines[-1] == ("expired", lease.lease_id)


def test_pressure_takes_the_least_recently_used_first_and_no_more_than_needed() -> None:
    world = World(blocks=9)
    old = world.hold("abc", first_block=0)
    world.now = 1
    world.hold("uvw", first_block=3, owner=OTHER)
    world.now = 2
    given(world.ask("abc"))
    world.lessor.end_ticket("t1")
    assert world.lessor.make_room(5)
    assert [lease.owner for lease in world.lessor.leases()] == [OWNER]
    assert old.epoch == 1
    assert world.pool.num_free() == 6


def test_pressure_leaves_what_a_ticket_covers() -> None:
    world = World(blocks=6)
    world.hold("abc", first_block=0)
    given(world.ask("abc"))
    assert not world.lessor.make_room(6)
    assert world.pool.num_free() == 3


def test_room_that_is_there_costs_no_lease() -> None:
    world = World(blocks=10)
    world.hold("abc")
    assert not world.lessor.make_room(7)
    assert len(world.lessor.leases()) == 1


def test_branches_of_a_session_are_limited() -> None:
    world = World(branches=2)
    for turn, text in enumerate(["aX", "aY", "aZ"]):
        world.now = turn
        world.hold(text, first_block=10 * turn)
    assert [lease.block_ids[0] for lease in world.lessor.leases()] == [10, 20]
    assert world.pool.num_free() == 96


def test_reset_ends_everything_tickets_or_not() -> None:
    world = World()
    lease = world.hold("abc")
    given(world.ask("abc"))
    world.lessor.reset()
    assert world.pool.num_free() == 100
    assert world.log.lines[-1] == ("lost", lease.lease_id)
    assert world.ask("abc", "t2") is Refusal.NOT_HELD


def test_held_blocks_counts_shared_ones_once() -> None:
    world = World()
    world.hold("abX", first_block=0)
    world.lessor.grant(OWNER, 1, fingerprint("abY"), [0, 1, 7])
    assert world.lessor.held_blocks() == 4


def test_a_ticket_of_another_attempt_is_refused_and_changes_nothing() -> None:
    world = World()
    world.hold("abc")
    first = given(world.ask("abc", attempt="a1"))
    assert world.ask("abc", attempt="a2") is Refusal.USED
    assert world.ask("abc", attempt="a1") is first


@pytest.mark.parametrize("asked_first", [True, False])
def test_a_ticket_that_is_over_is_not_given_again_in_whatever_order_its_messages_came(asked_first: bool) -> None:
    world = World()
    world.hold("abc")
    if asked_first:
        given(world.ask("abc"))
    world.lessor.end_ticket("t1")
    assert world.ask("abc") is Refusal.USED
    lease = world.lessor.leases()[0]
    assert not lease.tickets


def test_ids_of_old_tickets_are_forgotten() -> None:
    world = World()
    world.hold("abc")
    world.lessor.end_ticket("t1")
    world.now = 30
    world.lessor.step()
    assert given(world.ask("abc")).num_blocks == 3


def test_a_renewal_for_another_epoch_or_beyond_the_longest_ttl() -> None:
    world = World()
    lease = world.hold("abc")
    assert not world.lessor.renew(lease.lease_id, 500, epoch=lease.epoch + 1)
    assert lease.deadline == 120
    assert world.lessor.renew(lease.lease_id, 5000, epoch=lease.epoch)
    assert (lease.deadline, lease.granted_ttl) == (1000, 1000)
    assert world.log.lines[-1] == ("changed", lease.lease_id)


def test_a_successor_ends_no_earlier_than_what_it_supersedes_and_stays_renewed() -> None:
    world = World()
    world.lessor.renew(world.hold("ab").lease_id, 900)
    world.now = 10
    lease = world.hold("abc", first_block=10)
    assert (lease.deadline, lease.renewed) == (900, True)


def test_tokens_of_a_session_are_counted_once_and_move_to_whoever_is_left() -> None:
    world = World()
    first = world.hold("abX", first_block=0)
    second = world.lessor.grant(OWNER, 1, fingerprint("abY"), [0, 1, 7])
    assert (first.own_blocks, second.own_blocks) == (3, 1)
    world.lessor.release(first.lease_id)
    assert second.own_blocks == 3
    assert world.log.lines[-1] == ("changed", second.lease_id)


def test_a_session_over_its_limit_loses_its_least_valuable_branch() -> None:
    world = World(session=5)
    old = world.hold("aXX", first_block=0)
    world.now = 50
    new = world.hold("bYY", first_block=10)
    world.hold("cde", first_block=20, owner=OTHER)
    assert [lease.lease_id for lease in world.lessor.leases() if lease.owner == OWNER] == [new.lease_id]
    assert ("evicted", old.lease_id) in world.log.lines


def test_a_tenant_over_its_limit_loses_its_own_and_nobody_elses() -> None:
    world = World(tenant=5)
    foreign = world.hold("xyzuvw"[:5], first_block=50, owner=Owner("other", "s9"))
    world.now = 50
    world.hold("abc", first_block=0)
    world.now = 60
    last = world.hold("def", first_block=10, owner=OTHER)
    assert [lease.lease_id for lease in world.lessor.leases()] == [foreign.lease_id, last.lease_id]


def test_a_limit_takes_nothing_that_a_ticket_covers() -> None:
    world = World(tenant=5)
    read = world.hold("abc", first_block=0)
    given(world.ask("abc"))
    world.now = 1
    world.hold("def", first_block=10, owner=OTHER)
    assert [lease.lease_id for lease in world.lessor.leases()] == [read.lease_id]


def test_under_pressure_a_renewed_lease_outlives_one_that_nobody_renews() -> None:
    world = World(blocks=9)
    renewed = world.hold("abc", first_block=0)
    world.lessor.renew(renewed.lease_id, 120)
    world.now = 5
    world.hold("uvw", first_block=3, owner=OTHER)
    assert world.lessor.make_room(6)
    assert [lease.lease_id for lease in world.lessor.leases()] == [renewed.lease_id]


def test_under_pressure_what_a_sibling_holds_too_goes_first() -> None:
    world = World(blocks=20)
    world.hold("abcd", first_block=0)
    twin = world.lessor.grant(OWNER, 1, fingerprint("abc"), [0, 1, 2])
    world.now = 50
    world.hold("uvw", first_block=10, owner=OTHER)
    world.lessor.make_room(15)
    assert ("evicted", twin.lease_id) in world.log.lines
    assert world.log.lines.index(("evicted", twin.lease_id)) < len(world.log.lines)
    assert [lease.block_ids[0] for lease in world.lessor.leases()] == [10]
