"""Turns that ended: remembered for the next plan, reported to the session service."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvtide_gateway.plan import PlannedEngine


@dataclass(frozen=True)
class EndedTurn:
    """A turn whose blocks D was asked to keep."""

    tenant: str
    session_id: str
    turn: int
    model: str
    decode: PlannedEngine


class RecentTurns:
    """The last turn of each session that this gateway saw end."""

    def __init__(self, limit: int, window: float, clock: Callable[[], float]) -> None:
        """``limit`` sessions; ``window``: seconds after a turn in which its lease may still be unreported."""
        self._limit = limit
        self._window = window
        self._clock = clock
        self._turns: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()

    def ended(self, tenant: str, session_id: str, turn: int) -> None:
        """A turn with retention ended now."""
        key = (tenant, session_id)
        self._turns[key] = (max(turn, self.last(tenant, session_id)), self._clock())
        self._turns.move_to_end(key)
        if len(self._turns) > self._limit:
            self._turns.popitem(last=False)

    def last(self, tenant: str, session_id: str) -> int:
        """The last turn's number; 0 when there was none."""
        return self._turns.get((tenant, session_id), (0, 0.0))[0]

    def unreported(self, tenant: str, session_id: str) -> int:
        """The last turn's number while its lease may still be on its way; else 0."""
        turn, at = self._turns.get((tenant, session_id), (0, 0.0))
        return turn if turn and self._clock() - at <= self._window else 0


Send = Callable[[EndedTurn], Awaitable[bool]]


class TurnReporter:
    """Reports in the background; a report that fails or finds too many under way is counted, not repeated."""

    def __init__(self, send: Send, limit: int, count: Callable[[str], None]) -> None:
        """``send`` says whether it worked; ``count`` gets "ok", "failed" or "dropped"."""
        self._send = send
        self._limit = limit
        self._count = count
        self._tasks: set[asyncio.Task[None]] = set()

    def report(self, turn: EndedTurn) -> None:
        """Returns at once."""
        if len(self._tasks) >= self._limit:
            self._count("dropped")
            return
        task = asyncio.create_task(self._run(turn))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, turn: EndedTurn) -> None:
        self._count("ok" if await self._send(turn) else "failed")

    async def aclose(self) -> None:
        """Lets the reports that are under way end; each has its own timeout."""
        await asyncio.gather(*self._tasks)
