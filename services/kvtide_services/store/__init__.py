"""What the services publish and share: engines, leases, sessions, session events."""

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from kvtide.lease.v1 import lease_pb2
from kvtide_services.errors import InvalidToken

FIRST_TOKEN = "0-0"
_TOKEN = re.compile(r"\d{1,20}-\d{1,20}", re.ASCII)


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
    """A change to a session: "opened", "turn", "closed" or "lapsed"; ``token`` orders the events of a tenant."""

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


@dataclass(frozen=True)
class TurnCounted:
    """What became of a TurnRecord: the time left, and whether the session is new."""

    left: timedelta
    opened: bool


@dataclass(frozen=True)
class Held:
    """What a plan needs of a session: its leases, and how many turns were counted (0: none, or no record)."""

    leases: tuple[lease_pb2.Lease, ...]
    turns: int


class Opening(enum.IntEnum):
    """What became of an attempt to open a session."""

    TAKEN = 0
    """A live session of another request id is there."""
    OPENED = 1
    REPEATED = 2
    """The same request opened it before; nothing changed."""


class EngineStore(Protocol):
    """Engines that are attached somewhere. All methods raise StoreUnavailable."""

    async def put_engines(self, statuses: Sequence[lease_pb2.EngineStatus], ttl: timedelta) -> None:
        """Each replaces the engine of its name."""

    async def drop_engine(self, name: str) -> None: ...

    async def engines(self) -> list[lease_pb2.EngineStatus]:
        """By name. A store without an incarnation says nothing about engines: it raises StoreUnavailable too."""

    async def incarnation(self) -> str:
        """What :meth:`begin` set; empty when it never did or the store was emptied since."""

    async def begin(self, incarnation: str) -> str:
        """Sets the incarnation unless there is one; returns the one that holds."""


class LeaseStore(Protocol):
    """The directory of block leases. All methods raise StoreUnavailable."""

    async def put_leases(self, leases: Sequence[lease_pb2.Lease]) -> None:
        """Each replaces the lease of its session and id; a later one in the sequence wins."""

    async def drop_leases(self, leases: Sequence[lease_pb2.Lease]) -> None:
        """Removes each unless a higher epoch or another boot id took its place."""


class SessionStore(Protocol):
    """Session records with a TTL. All methods raise StoreUnavailable."""

    async def create(self, record: SessionRecord) -> Opening:
        """Opens a session for ``record.granted_ttl``."""

    async def get(self, tenant: str, session_id: str) -> SessionRecord | None: ...

    async def page(self, tenant: str, after: str, count: int) -> tuple[list[SessionRecord], str]:
        """Up to ``count`` sessions behind the id ``after``, in the order of ids, and the id to go on behind, or ""."""

    async def close(self, tenant: str, session_id: str) -> bool:
        """False when there was none."""

    async def renew(self, tenant: str, session_ids: Sequence[str], ttl: timedelta | None) -> list[timedelta | None]:
        """The time left of each: at least ``ttl`` (None: as granted last), never less than before; None: gone."""

    async def record_turn(self, tenant: str, session_id: str, turn: TurnRecord, ttl: timedelta) -> TurnCounted:
        """Opens the session when it is new, counts the turn once, and leaves at least ``ttl``."""

    async def lapse(self) -> list[tuple[str, str]]:
        """Sessions (tenant, id) whose TTL passed; each is returned to one caller only, and its event sent once."""

    async def last_token(self, tenant: str) -> str:
        """The token of the latest event; FIRST_TOKEN before the first."""

    async def events(self, tenant: str, after: str, wait: timedelta) -> list[SessionEvent]:
        """Events behind a token, waiting at most ``wait`` for the first.

        Raises InvalidToken when events behind it are forgotten, be it by age or because the store was emptied.
        """


class PlanStore(EngineStore, Protocol):
    """What routing reads. All methods raise StoreUnavailable."""

    async def held(self, tenant: str, session_id: str) -> Held:
        """On the path of every turn: one round trip."""


class Store(LeaseStore, SessionStore, PlanStore, Protocol):
    """All of it."""

    async def aclose(self) -> None: ...


def check_token(token: str) -> str:
    """Raises InvalidToken for what is not the token of an event."""
    if not _TOKEN.fullmatch(token):
        raise InvalidToken("resume_token")
    return token
