"""Blocks that P keeps for the one D that will read them, by reference count.

vLLM delays the free of such a request instead, and polls every millisecond for as long as one is open. Here its workers
still watch for the reader's word and the deadline, but what they report goes to this class: an idle P sleeps, and frees
at its next step.
"""

from collections.abc import Sequence

from kvtide_connector.holds import BlockPool


class Offers:
    """Scheduler thread only."""

    def __init__(self, workers: int) -> None:
        """``workers``: how many report each end."""
        self._workers = workers
        self._open: dict[str, tuple[list[int], int]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def make(self, pool: BlockPool, request_id: str, block_ids: Sequence[int]) -> None:
        """Keeps the blocks of a finished prompt."""
        kept = list(block_ids)
        pool.pin(kept)
        self._open[request_id] = kept, 0

    def over(self, pool: BlockPool, request_id: str, reports: int) -> None:
        """So many workers more say that the offer was read or ran out; the last one's word frees the blocks."""
        if request_id not in self._open:
            return
        kept, before = self._open.pop(request_id)
        if before + reports < self._workers:
            self._open[request_id] = kept, before + reports
        else:
            pool.unpin(kept)
