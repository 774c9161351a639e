"""The ways in which a turn can run, as a ladder that is only ever gone down."""

from enum import StrEnum


class Strategy(StrEnum):
    """From the best rung to the last."""

    DECODE_DIRECT = "DECODE_DIRECT"
    PREFILL_REUSE = "PREFILL_REUSE"
    PREFILL_FRESH = "PREFILL_FRESH"
    DECODE_ONLY = "DECODE_ONLY"

    @property
    def rank(self) -> int:
        """0 for the best rung."""
        return list(Strategy).index(self)

    @property
    def below(self) -> "Strategy":
        """The next rung down; the last one stays."""
        return list(Strategy)[min(self.rank + 1, len(Strategy) - 1)]

    @property
    def uses_prefill(self) -> bool:
        """Whether P takes part."""
        return self in (Strategy.PREFILL_REUSE, Strategy.PREFILL_FRESH)

    @property
    def uses_lease(self) -> bool:
        """Whether D's held blocks take part."""
        return self in (Strategy.DECODE_DIRECT, Strategy.PREFILL_REUSE)


def named(name: str) -> Strategy | None:
    """A strategy by its name; empty is none. Raises ValueError."""
    if not name:
        return None
    try:
        return Strategy(name)
    except ValueError:
        raise ValueError(f"a strategy is one of {', '.join(Strategy)}, not {name!r}") from None
