"""Decode engines of earlier plans, for the time that routing is away."""

from collections import OrderedDict
from collections.abc import Set

from kvtide_gateway.plan import PlannedEngine


class KnownEngines:
    """The most recently planned engines, by model."""

    def __init__(self, limit: int) -> None:
        """``limit``: engines to remember, of all models together."""
        self._limit = limit
        self._engines: OrderedDict[tuple[str, str], PlannedEngine] = OrderedDict()

    def learn(self, model: str, engine: PlannedEngine) -> None:
        """An engine was planned for a model."""
        self._engines[model, engine.name] = engine
        self._engines.move_to_end((model, engine.name))
        if len(self._engines) > self._limit:
            self._engines.popitem(last=False)

    def models(self) -> list[str]:
        """Sorted, each once."""
        return sorted({model for model, _ in self._engines})

    def find(self, model: str, avoid: Set[str] = frozenset()) -> PlannedEngine | None:
        """The engine planned last for a model."""
        found = (e for (m, name), e in reversed(self._engines.items()) if m == model and name not in avoid)
        return next(found, None)

    def any(self, avoid: Set[str] = frozenset()) -> PlannedEngine | None:
        """The engine planned last for whatever model."""
        return next((e for (_, name), e in reversed(self._engines.items()) if name not in avoid), None)
