"""What the lease service believes of its engines: their own word, of their present start only."""

import pytest

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_services.errors import IncompatibleEngine
from kvtide_services.lease.mirror import Mirror


def engine(boot_id: str = "boot-1") -> pb.Engine:
    return pb.Engine(
        name="decode-0",
        boot_id=boot_id,
        role=pb.ENGINE_ROLE_DECODE,
        model="m",
        http_url="http://d",
        block_size=32,
        pairing_digest="x",
    )


def lease(lease_id: str, epoch: int = 1, tenant: str = "acme", session_id: str = "s1") -> pb.Lease:
    return pb.Lease(lease_id=lease_id, epoch=epoch, tenant=tenant, session_id=session_id, engine="decode-0")


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.mirror = Mirror(lambda: self.now, patience=3.0)

    def hello(self, *leases: pb.Lease, boot_id: str = "boot-1") -> list[str]:
        change = self.mirror.hello(pb.Hello(protocol_version=1, engine=engine(boot_id), leases=leases))
        return [dropped.lease_id for dropped in change.dropped]

    def ids(self, tenant: str = "acme", session_id: str = "") -> list[str]:
        return [found.lease_id for found in self.mirror.leases(tenant, session_id)]


def test_a_hello_replaces_what_was_known() -> None:
    world = World()
    world.hello(lease("a"), lease("b"))
    assert world.hello(lease("b"), lease("c")) == ["a"]
    assert world.ids() == ["b", "c"]


def test_a_restart_drops_every_lease_of_the_start_before() -> None:
    world = World()
    world.hello(lease("a"))
    assert world.hello(boot_id="boot-2") == ["a"]
    world.mirror.granted(engine("boot-1"), lease("late"))
    assert world.ids() == []


def test_the_end_of_an_older_epoch_does_not_end_the_present_one() -> None:
    world = World()
    world.hello(lease("a", epoch=5))
    world.mirror.ended(engine(), pb.LeaseEnded(lease_id="a", epoch=4))
    assert world.ids() == ["a"]
    assert world.mirror.ended(engine(), pb.LeaseEnded(lease_id="a", epoch=5)).dropped[0].lease_id == "a"


def test_another_tenant_finds_nothing() -> None:
    world = World()
    world.hello(lease("a"), lease("b", tenant="evil"))
    assert world.ids() == ["a"]
    assert world.ids("evil", "s2") == []


def test_an_engine_is_forgotten_after_three_silent_beats_and_not_before() -> None:
    world = World()
    world.hello(lease("a"))
    world.now = 1.0
    world.mirror.heard(engine(), pb.Beat(clock_stamp=9))
    world.now = 3.9
    assert world.mirror.expire() == []
    world.now = 4.0
    assert [gone.engine.name for gone in world.mirror.expire()] == ["decode-0"]
    assert world.ids() == []


def test_the_time_left_runs_down() -> None:
    world = World()
    held = lease("a")
    held.ttl.FromSeconds(100)
    world.hello(held)
    world.now = 40.0
    assert [found.ttl.seconds for found in world.mirror.leases("acme")] == [60]
    world.now = 200.0
    assert [found.ttl.seconds for found in world.mirror.every_lease()] == [0]


def test_an_engine_speaks_for_itself_only() -> None:
    world = World()
    forged = lease("a")
    forged.engine, forged.boot_id = "decode-9", "boot-9"
    world.hello(forged, lease("b", tenant=""))
    world.mirror.granted(engine(), lease(""))
    assert [(found.engine, found.boot_id) for found in world.mirror.every_lease()] == [("decode-0", "boot-1")]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"protocol_version": 4}, "protocol_version"),
        ({"engine": pb.Engine()}, "engine.name"),
        ({"engine": pb.Engine(name="d", boot_id="b", http_url="h", model="m", pairing_digest="x")}, "engine.role"),
    ],
)
def test_an_engine_that_cannot_take_part_is_told_which_field_is_wrong(change: dict[str, object], named: str) -> None:
    hello = pb.Hello(protocol_version=1, engine=engine())
    for field, value in change.items():
        if isinstance(value, pb.Engine):
            hello.engine.CopyFrom(value)
        else:
            setattr(hello, field, value)
    with pytest.raises(IncompatibleEngine) as raised:
        World().mirror.hello(hello)
    assert raised.value.metadata["field"] == named
