"""What a held lease is worth: the one of least value is let go first."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Worth:
    """The formula's constants: ``half_life`` in nanoseconds, ``long_blocks`` in blocks."""

    half_life: int
    long_blocks: int

    def of(self, own_blocks: int, idle: int, left: int, granted_ttl: int, renewed: bool, tenant_share: float) -> float:
        """Expected saving of recomputation for each block that letting go would free; 0 when it would free none.

        ``idle`` (since the last use), ``left`` (until the deadline) and ``granted_ttl`` are in nanoseconds.

            cost     = 1 + own_blocks / long_blocks      (a block's prefill: constant work, and attention to all before)
            chance   = 2^(-idle / half_life) * min(1, left / granted_ttl) * (1 if renewed else 1/2)
            fairness = 1 / (1 + tenant_share)
            value    = cost * chance * fairness
        """
        if not own_blocks:
            return 0.0
        cost = 1 + own_blocks / self.long_blocks
        remaining = min(1.0, max(0, left) / granted_ttl)
        chance = 2.0 ** (-idle / self.half_life) * remaining * (1.0 if renewed else 0.5)
        return cost * chance / (1 + tenant_share)
