"""What the attached engines said they hold. Rules only: no transport, no store."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_services.errors import IncompatibleEngine

PROTOCOL_VERSION = 2


@dataclass(frozen=True)
class Held:
    """A lease as reported; ``until`` is when its deadline passes."""

    lease: pb.Lease
    until: float

    def at(self, now: float) -> pb.Lease:
        """The lease with the time left now."""
        lease = pb.Lease()
        lease.CopyFrom(self.lease)
        lease.ttl.FromTimedelta(timedelta(seconds=max(0.0, self.until - now)))
        return lease


@dataclass
class Attached:
    """One engine as its link described it."""

    engine: pb.Engine
    heard_at: float
    beat: pb.Beat = field(default_factory=pb.Beat)
    held: dict[str, Held] = field(default_factory=dict)

    @property
    def status(self) -> pb.EngineStatus:
        """As it is published."""
        return pb.EngineStatus(engine=self.engine, beat=self.beat, leases=len(self.held))


@dataclass(frozen=True)
class Change:
    """What must be published after an event: of which engine, leases put and leases dropped."""

    engine: str
    put: tuple[pb.Lease, ...] = ()
    dropped: tuple[pb.Lease, ...] = ()


class Mirror:
    """The engines' word, kept per engine. Times are seconds of the injected clock."""

    def __init__(self, clock: Callable[[], float], patience: float) -> None:
        """``patience``: seconds without a beat after which an engine is gone, linked or not."""
        self._clock = clock
        self._patience = patience
        self._attached: dict[str, Attached] = {}

    def hello(self, hello: pb.Hello) -> Change:
        """An engine attached; what it lists replaces what was known of it. Raises IncompatibleEngine."""
        check(hello)
        name = hello.engine.name
        old = self._attached.get(name)
        fresh = Attached(hello.engine, self._clock())
        fresh.held = {lease.lease_id: self._held(hello.engine, lease) for lease in hello.leases if named(lease)}
        if old is not None and old.engine.boot_id == hello.engine.boot_id:
            fresh.beat = old.beat
        self._attached[name] = fresh
        gone = [held.lease for i, held in old.held.items() if i not in fresh.held] if old else []
        return Change(name, put=tuple(held.lease for held in fresh.held.values()), dropped=tuple(gone))

    def heard(self, engine: pb.Engine, beat: pb.Beat) -> None:
        """A beat of the start ``engine``; those of an older start are ignored."""
        attached = self._of(engine)
        if attached is not None:
            attached.beat, attached.heard_at = beat, self._clock()

    def granted(self, engine: pb.Engine, lease: pb.Lease) -> Change:
        """A lease was granted or replaced."""
        attached = self._of(engine)
        if attached is None or not named(lease):
            return Change(engine.name)
        held = attached.held[lease.lease_id] = self._held(engine, lease)
        return Change(engine.name, put=(held.lease,))

    def ended(self, engine: pb.Engine, ended: pb.LeaseEnded) -> Change:
        """A lease ended; the end of an older epoch says nothing about the present one."""
        attached = self._of(engine)
        held = attached.held.get(ended.lease_id) if attached else None
        if attached is None or held is None or held.lease.epoch > ended.epoch:
            return Change(engine.name)
        del attached.held[ended.lease_id]
        return Change(engine.name, dropped=(held.lease,))

    def expire(self) -> list[Attached]:
        """Forgets engines that were silent for too long and returns them."""
        due = self._clock() - self._patience
        gone = [a for a in self._attached.values() if a.heard_at <= due]
        for attached in gone:
            del self._attached[attached.engine.name]
        return gone

    def attached(self) -> list[Attached]:
        """All engines that count as present, by name."""
        return sorted(self._attached.values(), key=lambda a: a.engine.name)

    def every_lease(self) -> list[pb.Lease]:
        """All leases of all engines, with the time left now."""
        now = self._clock()
        return [held.at(now) for held in self._every()]

    def leases(self, tenant: str, session_id: str = "") -> list[pb.Lease]:
        """A tenant's leases, of one session when named, by id, with the time left now."""
        now = self._clock()
        mine = [h for h in self._every() if h.lease.tenant == tenant and session_id in ("", h.lease.session_id)]
        return sorted((held.at(now) for held in mine), key=lambda lease: (lease.lease_id, lease.engine))

    def _every(self) -> Iterable[Held]:
        return (held for a in self._attached.values() for held in a.held.values())

    def _held(self, engine: pb.Engine, reported: pb.Lease) -> Held:
        """An engine speaks for itself only, whatever its report says."""
        lease = pb.Lease()
        lease.CopyFrom(reported)
        lease.engine, lease.boot_id = engine.name, engine.boot_id
        return Held(lease, self._clock() + lease.ttl.ToTimedelta().total_seconds())

    def _of(self, engine: pb.Engine) -> Attached | None:
        attached = self._attached.get(engine.name)
        return attached if attached is not None and attached.engine.boot_id == engine.boot_id else None


def named(lease: pb.Lease) -> bool:
    """Whether a report says whose lease it is; others are of no use to anybody."""
    return bool(lease.lease_id and lease.tenant and lease.session_id)


def check(hello: pb.Hello) -> None:
    """Raises IncompatibleEngine for an engine that cannot take part."""
    if abs(hello.protocol_version - PROTOCOL_VERSION) > 1:
        want = f"{PROTOCOL_VERSION}, one version of skew allowed"
        raise IncompatibleEngine("protocol_version", hello.protocol_version, want)
    for name in ("name", "boot_id", "http_url", "model", "pairing_digest"):
        if not getattr(hello.engine, name):
            raise IncompatibleEngine(f"engine.{name}", "", "set")
    if hello.engine.role not in (pb.ENGINE_ROLE_PREFILL, pb.ENGINE_ROLE_DECODE):
        raise IncompatibleEngine("engine.role", hello.engine.role, "prefill or decode")
    if hello.engine.block_size < 1:
        raise IncompatibleEngine("engine.block_size", hello.engine.block_size, "at least 1")
