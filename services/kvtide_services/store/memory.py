"""The store in one process's memory: for tests and as the reference for what an operation means."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_services.errors import InvalidToken, StoreUnavailable
from kvtide_services.store import (
    FIRST_TOKEN,
    Held,
    Opening,
    SessionEvent,
    SessionRecord,
    TurnCounted,
    TurnRecord,
    check_token,
)

Key = tuple[str, str]
M = TypeVar("M", pb.Lease, pb.EngineStatus)


@dataclass
class _Session:
    record: SessionRecord
    until: float
    used: float


@dataclass
class _Leases:
    until: float = 0.0
    by_id: dict[str, pb.Lease] = field(default_factory=dict)


@dataclass
class _Events:
    kept: list[SessionEvent] = field(default_factory=list)
    added: int = 0
    more: asyncio.Condition = field(default_factory=asyncio.Condition)


class MemoryStore:
    """Times are seconds of the injected clock; waiting for events is real."""

    def __init__(self, clock: Callable[[], float], history: int) -> None:
        """``history``: events kept per tenant."""
        self._clock = clock
        self._history = history
        self._incarnation = ""
        self._engines: dict[str, tuple[pb.EngineStatus, float]] = {}
        self._leases: dict[Key, _Leases] = {}
        self._sessions: dict[Key, _Session] = {}
        self._events: dict[str, _Events] = {}

    async def aclose(self) -> None:
        """Nothing to close."""

    # Engines.

    async def put_engines(self, statuses: Sequence[pb.EngineStatus], ttl: timedelta) -> None:
        until = self._clock() + ttl.total_seconds()
        self._engines |= {status.engine.name: (_copy(status), until) for status in statuses}

    async def drop_engine(self, name: str) -> None:
        self._engines.pop(name, None)

    async def engines(self) -> list[pb.EngineStatus]:
        if not self._incarnation:
            raise StoreUnavailable
        return [status for _, (status, until) in sorted(self._engines.items()) if until > self._clock()]

    async def incarnation(self) -> str:
        return self._incarnation

    async def begin(self, incarnation: str) -> str:
        self._incarnation = self._incarnation or incarnation
        return self._incarnation

    # Leases.

    async def put_leases(self, leases: Sequence[pb.Lease]) -> None:
        for lease in leases:
            held = self._leases_of(lease.tenant, lease.session_id)
            held.by_id[lease.lease_id] = _copy(lease)
            held.until = max(held.until, self._clock() + lease.ttl.ToTimedelta().total_seconds())

    async def drop_leases(self, leases: Sequence[pb.Lease]) -> None:
        for lease in leases:
            held = self._leases_of(lease.tenant, lease.session_id).by_id
            stored = held.get(lease.lease_id)
            if stored is not None and stored.boot_id == lease.boot_id and stored.epoch <= lease.epoch:
                del held[lease.lease_id]

    async def held(self, tenant: str, session_id: str) -> Held:
        session = self._live(tenant, session_id)
        leases = self._leases_of(tenant, session_id).by_id.values()
        return Held(tuple(leases), session.record.turns if session else 0)

    def _leases_of(self, tenant: str, session_id: str) -> _Leases:
        found = self._leases.get((tenant, session_id))
        if found is None or found.until <= self._clock():
            found = self._leases[tenant, session_id] = _Leases()
        return found

    # Sessions.

    async def create(self, record: SessionRecord) -> Opening:
        old = self._live(record.tenant, record.session_id)
        if old is not None:
            same = record.request_id != "" and old.record.request_id == record.request_id
            return Opening.REPEATED if same else Opening.TAKEN
        await self._open(record)
        return Opening.OPENED

    async def get(self, tenant: str, session_id: str) -> SessionRecord | None:
        found = self._live(tenant, session_id)
        return self._now(found) if found else None

    async def page(self, tenant: str, after: str, count: int) -> tuple[list[SessionRecord], str]:
        ids = sorted(i for t, i in self._sessions if t == tenant and i > after)
        found = [self._live(tenant, i) for i in ids[:count]]
        return [self._now(session) for session in found if session], ids[count - 1] if len(ids) > count else ""

    async def close(self, tenant: str, session_id: str) -> bool:
        if self._live(tenant, session_id) is None:
            return False
        del self._sessions[tenant, session_id]
        await self._emit(tenant, "closed", session_id)
        return True

    async def renew(self, tenant: str, session_ids: Sequence[str], ttl: timedelta | None) -> list[timedelta | None]:
        return [self._renew(tenant, session_id, ttl) for session_id in session_ids]

    async def record_turn(self, tenant: str, session_id: str, turn: TurnRecord, ttl: timedelta) -> TurnCounted:
        session = self._live(tenant, session_id)
        opened = session is None
        if session is None:
            session = await self._open(SessionRecord(tenant, session_id, ttl, ttl, timedelta(0)))
        if turn.number > session.record.turns:
            session.record = dataclasses.replace(
                session.record,
                turns=turn.number,
                model=turn.model,
                decode_engine=turn.decode_engine,
                decode_boot_id=turn.decode_boot_id,
            )
            await self._emit(tenant, "turn", session_id)
        self._extend(session, ttl)
        return TurnCounted(self._now(session).ttl, opened)

    async def lapse(self) -> list[Key]:
        due = [key for key, session in self._sessions.items() if session.until <= self._clock()]
        for tenant, session_id in due:
            del self._sessions[tenant, session_id]
            await self._emit(tenant, "lapsed", session_id)
        return due

    def _live(self, tenant: str, session_id: str) -> _Session | None:
        found = self._sessions.get((tenant, session_id))
        return found if found is not None and found.until > self._clock() else None

    def _now(self, session: _Session) -> SessionRecord:
        now = self._clock()
        ttl, idle = timedelta(seconds=session.until - now), timedelta(seconds=now - session.used)
        return dataclasses.replace(session.record, ttl=ttl, idle=idle)

    async def _open(self, record: SessionRecord) -> _Session:
        if (record.tenant, record.session_id) in self._sessions:
            await self._emit(record.tenant, "lapsed", record.session_id)
        await self._emit(record.tenant, "opened", record.session_id)
        now = self._clock()
        session = _Session(record, now + record.granted_ttl.total_seconds(), now)
        self._sessions[record.tenant, record.session_id] = session
        return session

    def _renew(self, tenant: str, session_id: str, ttl: timedelta | None) -> timedelta | None:
        session = self._live(tenant, session_id)
        if session is None:
            return None
        granted = ttl or session.record.granted_ttl
        session.record = dataclasses.replace(session.record, granted_ttl=granted)
        self._extend(session, granted)
        return self._now(session).ttl

    def _extend(self, session: _Session, ttl: timedelta) -> None:
        session.used = self._clock()
        session.until = max(session.until, session.used + ttl.total_seconds())

    # Events.

    async def last_token(self, tenant: str) -> str:
        kept = self._of(tenant).kept
        return kept[-1].token if kept else FIRST_TOKEN

    async def events(self, tenant: str, after: str, wait: timedelta) -> list[SessionEvent]:
        events, position = self._of(tenant), _order(check_token(after))
        known = any(event.token == after for event in events.kept)
        if not known and (after != FIRST_TOKEN or events.added > len(events.kept)):
            raise InvalidToken("resume_token")
        try:
            async with asyncio.timeout(wait.total_seconds()), events.more:
                await events.more.wait_for(lambda: events.kept and _order(events.kept[-1].token) > position)
        except TimeoutError:
            return []
        return [event for event in events.kept if _order(event.token) > position]

    async def _emit(self, tenant: str, kind: str, session_id: str) -> None:
        events = self._of(tenant)
        events.added += 1
        events.kept = [*events.kept, SessionEvent(f"{events.added}-0", kind, session_id)][-self._history :]
        async with events.more:
            events.more.notify_all()

    def _of(self, tenant: str) -> _Events:
        return self._events.setdefault(tenant, _Events())


def _order(token: str) -> tuple[int, int]:
    first, _, second = token.partition("-")
    return int(first), int(second)


def _copy(message: M) -> M:
    fresh = type(message)()
    fresh.CopyFrom(message)
    return fresh
