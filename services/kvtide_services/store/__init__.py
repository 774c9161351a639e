"""What the services publish and share: engines, leases, sessions, session events."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from kvtide.lease.v1 import lease_pb2


@dataclass(frozen=True)
class SessionRecord:
    """A session as it is now."""

    tenant: str
    session_id: str
    ttl: timedelta
    granted_ttl: timedelta
    idle: timedelta
    model: str = ""
    turns: int = 0
    decode_engine: str = ""
    decode_boot_id: str = ""
    request_id: str = ""
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SessionEvent:
    """A change to a session; ``token`` orders the events of a tenant."""

    token: str
    kind: str
    session_id: str


@dataclass(frozen=True)
class TurnRecord:
    """A turn that ended."""

    number: int
    model: str
    decode_engine: str
    decode_boot_id: str


class EngineStore(Protocol):
    """Engines that are attached somewhere. All methods raise StoreUnavailable."""

    async def put_engine(self, status: lease_pb2.EngineStatus, ttl: timedelta) -> None: ...

    async def drop_engine(self, name: str) -> None: ...

    async def engines(self) -> list[lease_pb2.EngineStatus]: ...

    async def incarnation(self, mine: str) -> bool:
        """False when the store had been emptied since ``mine`` was last seen or set; sets it then."""


class LeaseStore(Protocol):
    """The directory of block leases. All methods raise StoreUnavailable."""

    async def put_leases(self, leases: Sequence[lease_pb2.Lease]) -> None: ...

    async def drop_lease(self, lease: lease_pb2.Lease) -> None:
        """Removes it unless a higher epoch or another boot id took its place."""

    async def leases(self, tenant: str, session_id: str) -> list[lease_pb2.Lease]: ...


class SessionStore(Protocol):
    """Session records with a TTL. All methods raise StoreUnavailable."""

    async def create(self, record: SessionRecord) -> bool:
        """False when a live session of another request id is there; a repeat of one request id changes nothing."""

    async def get(self, tenant: str, session_id: str) -> SessionRecord | None: ...

    async def page(self, tenant: str, after: str, count: int) -> list[SessionRecord]:
        """Up to ``count`` sessions behind the id ``after``, in the order of ids."""

    async def close(self, tenant: str, session_id: str) -> bool: ...

    async def renew(self, tenant: str, session_id: str, ttl: timedelta | None) -> timedelta | None:
        """The time left, at least ``ttl`` (None: as granted last), never less than before; None when it is gone."""

    async def record_turn(self, tenant: str, session_id: str, turn: TurnRecord, ttl: timedelta) -> timedelta:
        """Opens the session when it is new, counts the turn, and leaves at least ``ttl``."""

    async def lapse(self) -> list[tuple[str, str]]:
        """Sessions (tenant, id) whose TTL passed; each is returned to one caller only."""

    async def last_token(self, tenant: str) -> str: ...

    async def events(self, tenant: str, after: str, wait: timedelta) -> list[SessionEvent]:
        """Events behind a token, waiting at most ``wait`` for the first. Raises InvalidToken."""


class Store(EngineStore, LeaseStore, SessionStore, Protocol):
    """All of it, over one connection pool."""

    async def aclose(self) -> None: ...
