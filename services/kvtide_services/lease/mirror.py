"""What the attached engines said they hold. Rules only: no transport, no store."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_services.errors import IncompatibleEngine

PROTOCOL_VERSION = 1


@dataclass
class Attached:
    """One engine as its link described it. ``lost_at`` is set while no link is up."""

    engine: pb.Engine
    beat: pb.Beat = field(default_factory=pb.Beat)
    leases: dict[str, pb.Lease] = field(default_factory=dict)
    heard_at: float = 0.0
    linked: bool = True


@dataclass(frozen=True)
class Change:
    """What must be published after an event."""

    put: tuple[pb.Lease, ...] = ()
    dropped: tuple[pb.Lease, ...] = ()


class Mirror:
    """The engines' word, kept per engine. Times are seconds of the injected clock."""

    def __init__(self, clock: Callable[[], float], patience: float) -> None:
        """``patience``: seconds without a beat after which an engine is gone."""
        self._clock = clock
        self._patience = patience
        self._attached: dict[str, Attached] = {}

    def hello(self, hello: pb.Hello) -> Change:
        """An engine attached; what it lists replaces what was known of it. Raises IncompatibleEngine."""
        check(hello)
        old = self._attached.get(hello.engine.name)
        fresh = Attached(hello.engine, leases={lease.lease_id: lease for lease in hello.leases}, heard_at=self._clock())
        if old is not None and old.engine.boot_id == hello.engine.boot_id:
            fresh.beat = old.beat
        self._attached[hello.engine.name] = fresh
        kept = fresh.leases
        gone = [lease for i, lease in old.leases.items() if i not in kept] if old else []
        return Change(put=tuple(kept.values()), dropped=tuple(gone))

    def heard(self, engine: pb.Engine, beat: pb.Beat) -> None:
        """A beat of the start ``engine``; those of an older start are ignored."""
        attached = self._of(engine)
        if attached is not None:
            attached.beat, attached.heard_at = beat, self._clock()

    def granted(self, engine: pb.Engine, lease: pb.Lease) -> Change:
        """A lease was granted or replaced."""
        attached = self._of(engine)
        if attached is None:
            return Change()
        attached.leases[lease.lease_id] = lease
        return Change(put=(lease,))

    def ended(self, engine: pb.Engine, ended: pb.LeaseEnded) -> Change:
        """A lease ended; the end of an older epoch says nothing about the present one."""
        attached = self._of(engine)
        lease = attached.leases.get(ended.lease_id) if attached else None
        if attached is None or lease is None or lease.epoch > ended.epoch:
            return Change()
        del attached.leases[ended.lease_id]
        return Change(dropped=(lease,))

    def unlinked(self, engine: pb.Engine) -> None:
        """The link is down; the engine may come back with what it holds."""
        attached = self._of(engine)
        if attached is not None:
            attached.linked = False

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

    def find(self, name: str) -> Attached | None:
        """The present engine of this name."""
        return self._attached.get(name)

    def leases(self, tenant: str, session_id: str = "") -> list[pb.Lease]:
        """A tenant's leases, of one session when named, by id."""
        every: Iterable[pb.Lease] = (lease for a in self._attached.values() for lease in a.leases.values())
        mine = [e for e in every if e.tenant == tenant and session_id in ("", e.session_id)]
        return sorted(mine, key=lambda lease: lease.lease_id)

    def _of(self, engine: pb.Engine) -> Attached | None:
        attached = self._attached.get(engine.name)
        return attached if attached is not None and attached.engine.boot_id == engine.boot_id else None


def check(hello: pb.Hello) -> None:
    """Raises IncompatibleEngine for an engine that cannot take part."""
    if abs(hello.protocol_version - PROTOCOL_VERSION) > 1:
        want = f"{PROTOCOL_VERSION}, one version of skew allowed"
        raise IncompatibleEngine("protocol_version", hello.protocol_version, want)
    for name in ("name", "boot_id", "http_url", "model", "pairing_digest"):
        if not getattr(hello.engine, name):
            raise IncompatibleEngine(f"engine.{name}", "", "set")
    if hello.engine.role == pb.ENGINE_ROLE_UNSPECIFIED:
        raise IncompatibleEngine("engine.role", "unspecified", "prefill or decode")
    if hello.engine.block_size < 1:
        raise IncompatibleEngine("engine.block_size", hello.engine.block_size, "at least 1")
