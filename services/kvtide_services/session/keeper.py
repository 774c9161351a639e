"""The rules of session leases. Knows no transport."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from kvtide_services.errors import InvalidField, SessionExists, SessionNotFound
from kvtide_services.store import Opening, SessionRecord, SessionStore, TurnRecord

MAX_ID, MAX_LABELS, MAX_LABEL_KEY, MAX_LABEL_VALUE = 256, 64, 63, 256
MAX_TURN = 2**53  # what the store counts exactly


class LeaseReleaser(Protocol):
    """Ends the block leases of a session."""

    def __call__(self, tenant: str, session_id: str) -> Awaitable[int]: ...


@dataclass(frozen=True)
class Terms:
    """What the server grants."""

    default: timedelta
    shortest: timedelta
    longest: timedelta
    idle: timedelta

    def grant(self, asked: timedelta | None) -> timedelta:
        """The TTL for a client that asked; clamped. Raises InvalidField for none or a negative one."""
        if asked is None:
            return self.default
        if asked <= timedelta(0):
            raise InvalidField("ttl", asked, "above 0")
        return min(max(asked, self.shortest), self.longest)


class SessionKeeper:
    """Opens, renews, closes and lapses sessions, and lets go of their blocks."""

    def __init__(self, store: SessionStore, terms: Terms, release: LeaseReleaser, new_id: Callable[[], str]) -> None:
        self._store = store
        self._terms = terms
        self._release = release
        self._new_id = new_id

    async def create(
        self,
        tenant: str,
        session_id: str,
        ttl: timedelta | None,
        model: str,
        labels: dict[str, str],
        request_id: str,
    ) -> SessionRecord:
        """Raises SessionExists, InvalidField, StoreUnavailable."""
        granted = self._terms.grant(ttl)
        check_labels(labels)
        _check_length("request_id", request_id, 128)
        name = check_id(session_id) if session_id else self._new_id()
        record = SessionRecord(
            tenant, name, granted, granted, timedelta(0), model=model, labels=labels, request_id=request_id
        )
        if await self._store.create(record) is Opening.TAKEN:
            raise SessionExists(name)
        return await self.get(tenant, name)

    async def get(self, tenant: str, session_id: str) -> SessionRecord:
        """Raises SessionNotFound, StoreUnavailable."""
        record = await self._store.get(tenant, check_id(session_id))
        if record is None:
            raise SessionNotFound(session_id)
        return record

    async def renew(self, tenant: str, session_id: str, ttl: timedelta | None) -> timedelta:
        """The time left. Raises SessionNotFound, InvalidField, StoreUnavailable."""
        granted = None if ttl is None else self._terms.grant(ttl)
        (left,) = await self._store.renew(tenant, [check_id(session_id)], granted)
        if left is None:
            raise SessionNotFound(session_id)
        return left

    async def keep_alive(self, tenant: str, session_ids: list[str]) -> list[tuple[str, timedelta | None]]:
        """The time left of each, in order; None for one that is lost. Raises StoreUnavailable."""
        return list(zip(session_ids, await self._store.renew(tenant, session_ids, None), strict=True))

    async def record_turn(self, tenant: str, session_id: str, turn: TurnRecord) -> timedelta:
        """The time left. Raises InvalidField, StoreUnavailable."""
        if turn.number < 1:
            raise InvalidField("turn", turn.number, "at least 1")
        if turn.number > MAX_TURN:
            raise InvalidField("turn", turn.number, f"at most {MAX_TURN}")
        return (await self._store.record_turn(tenant, check_id(session_id), turn, self._terms.idle)).left

    async def close(self, tenant: str, session_id: str) -> None:
        """Raises SessionNotFound, StoreUnavailable. Blocks are let go even when the record was gone already."""
        closed = await self._store.close(tenant, check_id(session_id))
        await self._release(tenant, session_id)
        if not closed:
            raise SessionNotFound(session_id)

    async def sweep(self) -> int:
        """Lets go of the blocks of sessions that lapsed; returns how many did. Raises StoreUnavailable."""
        lapsed = await self._store.lapse()
        for tenant, session_id in lapsed:
            await self._release(tenant, session_id)
        return len(lapsed)


def check_id(session_id: str) -> str:
    """Raises InvalidField."""
    if not 1 <= len(session_id) <= MAX_ID:
        raise InvalidField("session_id", session_id[:MAX_ID], f"1 to {MAX_ID} characters")
    return session_id


def check_labels(labels: dict[str, str]) -> None:
    """Raises InvalidField."""
    if len(labels) > MAX_LABELS:
        raise InvalidField("labels", len(labels), f"at most {MAX_LABELS}")
    for key, value in labels.items():
        if not 1 <= len(key) <= MAX_LABEL_KEY:
            raise InvalidField("labels", key[:MAX_LABEL_KEY], f"a key of 1 to {MAX_LABEL_KEY} characters")
        _check_length(f"labels[{key}]", value, MAX_LABEL_VALUE)


def _check_length(field: str, value: str, most: int) -> None:
    if len(value) > most:
        raise InvalidField(field, value[:most], f"at most {most} characters")
