"""Blocks that P keeps for one reader are freed once, when every worker has said that the offer is over."""

from collections.abc import Sequence

from kvtide_connector.offers import Offers


class Pool:
    """Counts references."""

    def __init__(self) -> None:
        self.pinned: list[int] = []

    def pin(self, block_ids: Sequence[int]) -> None:
        self.pinned += block_ids

    def unpin(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.pinned.remove(block_id)

    def num_free(self) -> int:
        return 0

    def num_blocks(self) -> int:
        return 0


def test_an_offer_is_kept_until_its_worker_reports() -> None:
    pool, offers = Pool(), Offers(workers=1)
    offers.make(pool, "a", [1, 2])
    offers.make(pool, "b", [2, 3])
    assert pool.pinned == [1, 2, 2, 3]
    offers.over(pool, "a", 1)
    assert pool.pinned == [2, 3]
    assert len(offers) == 1


def test_every_worker_must_report_together_or_in_turn() -> None:
    pool, offers = Pool(), Offers(workers=3)
    offers.make(pool, "a", [1])
    offers.over(pool, "a", 1)
    assert pool.pinned == [1]
    offers.over(pool, "a", 2)
    assert not pool.pinned


def test_reports_about_unknown_requests_change_nothing() -> None:
    pool, offers = Pool(), Offers(workers=1)
    offers.make(pool, "a", [1])
    offers.over(pool, "x", 1)
    offers.over(pool, "a", 1)
    offers.over(pool, "a", 1)
    assert not pool.pinned


def test_the_blocks_of_the_caller_may_change_afterwards() -> None:
    pool, offers = Pool(), Offers(workers=1)
    blocks = [1, 2]
    offers.make(pool, "a", blocks)
    blocks.clear()
    offers.over(pool, "a", 1)
    assert not pool.pinned
