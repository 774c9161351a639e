"""vLLM's block pool as the rules see it: block ids in, reference counts out."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class PinnedPool:
    """References on blocks of vLLM's pool. Scheduler thread only, but for the two counts."""

    def __init__(self, pool: "BlockPool") -> None:
        self._pool = pool

    def pin(self, block_ids: Sequence[int]) -> None:
        """Adds a reference to each block."""
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Drops a reference from each; the tail of a prefix is reused first."""
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])

    def num_free(self) -> int:
        """Blocks that an allocation can take now."""
        return int(self._pool.get_num_free_blocks())

    def num_blocks(self) -> int:
        """Usable blocks: all but vLLM's null block."""
        return int(self._pool.num_gpu_blocks) - 1

    def before_reset(self, release: Callable[[], None]) -> None:
        """Calls ``release`` before the prefix cache is reset, which fails while any block is referenced."""
        reset = self._pool.reset_prefix_cache

        def release_and_reset() -> bool:
            release()
            return reset()

        self._pool.reset_prefix_cache = release_and_reset  # no hook runs before it
