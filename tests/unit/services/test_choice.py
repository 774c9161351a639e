"""Which strategy, which engines, which lease, and what is said about it."""

from typing import Any

import pytest

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_services.routing.choice import DIRECT, FRESH, NONE, ONLY, REUSE, Known, Plan, Why, choose

ENGINES = ("prefill-0", "decode-0", "decode-1")
HOLDS = "D decode-0 holds 640 tokens of this session (turn 1)"


class World:
    """Engines by name, all alike unless changed."""

    def __init__(self, engine: Any, lease: Any) -> None:
        self._engine = engine
        self.lease = lease
        self.statuses = {name: self.status(name) for name in ENGINES}

    def status(self, name: str, load: int = 0, **fields: Any) -> pb.EngineStatus:
        return pb.EngineStatus(engine=self._engine(name, **fields), beat=pb.Beat(running_requests=load))

    def set(self, name: str, load: int = 0, **fields: Any) -> None:
        self.statuses[name] = self.status(name, load, **fields)

    def choose(self, known: Known, forced: Any = NONE, without: tuple[str, ...] = ()) -> Plan:
        engines = [status for name, status in self.statuses.items() if name not in without]
        plan = choose(engines, known, forced, threshold=64)
        assert plan is not None
        return plan


@pytest.fixture
def world(engine: Any, lease: Any) -> World:
    return World(engine, lease)


@pytest.fixture
def held(lease: Any) -> Known:
    return Known((lease(),), turns=1)


def test_a_lease_that_can_be_read_is(world: World, held: Known) -> None:
    plan = world.choose(held)
    assert (plan.strategy, plan.reason, plan.why, plan.turn) == (REUSE, HOLDS, Why.HELD, 2)
    assert plan.prefill is not None and plan.prefill.engine.name == "prefill-0"
    assert plan.decode.engine.name == "decode-0" and plan.lease == held.leases[0]


NOTHING = "nothing of this session is held"
NO_PREFILL = "no prefill engine can be paired"


@pytest.mark.parametrize(
    ("forced", "has_lease", "has_prefill", "strategy", "reason"),
    [
        (NONE, True, False, ONLY, f"{NO_PREFILL}; {HOLDS}"),
        (NONE, False, True, FRESH, NOTHING),
        (NONE, False, False, ONLY, f"{NO_PREFILL}; {NOTHING}"),
        (DIRECT, True, True, DIRECT, f"forced; {HOLDS}"),
        (DIRECT, True, False, DIRECT, f"forced; {HOLDS}"),
        (DIRECT, False, True, FRESH, f"forced DECODE_DIRECT cannot be done; {NOTHING}"),
        (DIRECT, False, False, ONLY, f"forced DECODE_DIRECT cannot be done; {NO_PREFILL}; {NOTHING}"),
        (REUSE, True, True, REUSE, f"forced; {HOLDS}"),
        (REUSE, True, False, ONLY, f"forced PREFILL_REUSE cannot be done; {NO_PREFILL}; {HOLDS}"),
        (REUSE, False, True, FRESH, f"forced PREFILL_REUSE cannot be done; {NOTHING}"),
        (FRESH, True, True, FRESH, f"forced; {HOLDS}"),
        (FRESH, True, False, ONLY, f"forced PREFILL_FRESH cannot be done; {NO_PREFILL}; {HOLDS}"),
        (ONLY, True, True, ONLY, f"forced; {HOLDS}"),
        (ONLY, False, False, ONLY, f"forced; {NOTHING}"),
    ],
)
def test_the_ladder(
    world: World, held: Known, forced: Any, has_lease: bool, has_prefill: bool, strategy: Any, reason: str
) -> None:
    plan = world.choose(held if has_lease else Known(), forced, () if has_prefill else ("prefill-0",))
    assert (plan.strategy, plan.reason) == (strategy, reason)
    assert (plan.lease is not None) == (strategy in (DIRECT, REUSE))
    assert (plan.prefill is not None) == (strategy in (REUSE, FRESH))


def test_without_a_decode_engine_there_is_no_plan(world: World) -> None:
    assert choose([world.statuses["prefill-0"]], Known(), NONE, 64) is None


def test_a_lease_of_a_former_start_is_not_used(world: World, held: Known) -> None:
    world.set("decode-0", boot_id="decode-0-2")
    plan = world.choose(held)
    assert (plan.strategy, plan.why, plan.turn) == (FRESH, Why.GONE, 2)
    assert plan.reason == "the engine that held this session is gone or to be avoided"


def test_a_lease_below_the_threshold_is_not_read_but_may_be_used_in_place(world: World) -> None:
    known = Known((world.lease(num_tokens=63, engine="decode-1", boot_id="decode-1-1"),))
    plan = world.choose(known)
    assert (plan.strategy, plan.why, plan.decode.engine.name) == (FRESH, Why.SHORT, "decode-1")
    assert plan.reason == "D decode-1 holds 63 tokens of this session (turn 1), fewer than 64"
    assert world.choose(known, DIRECT).strategy == DIRECT
    assert world.choose(Known((world.lease(num_tokens=64),))).strategy == REUSE


def test_the_latest_turns_longest_lease_is_chosen(world: World) -> None:
    leases = [
        world.lease("long", turn=3, num_tokens=9000),
        world.lease("short", turn=5, num_tokens=4800),
        world.lease("best", turn=5, num_tokens=4928, engine="decode-1", boot_id="decode-1-1"),
    ]
    plan = world.choose(Known(tuple(leases), turns=7))
    assert plan.lease is not None and plan.lease.lease_id == "best"
    assert (plan.decode.engine.name, plan.turn) == ("decode-1", 8)
    assert plan.reason == "D decode-1 holds 4,928 tokens of this session (turn 5)"
    assert world.choose(Known(tuple(leases), turns=2)).turn == 6


def test_the_least_loaded_engines_are_chosen_and_the_holder_whatever_its_load(world: World, held: Known) -> None:
    world.set("decode-0", load=5)
    world.set("prefill-0", load=2)
    world.set("prefill-1", load=1)
    plan = world.choose(Known())
    assert plan.prefill is not None
    assert (plan.prefill.engine.name, plan.decode.engine.name) == ("prefill-1", "decode-1")
    assert world.choose(held).decode.engine.name == "decode-0"


def test_engines_that_differ_are_never_paired(world: World, held: Known) -> None:
    world.set("decode-0", pairing_digest="other")
    assert world.choose(held).strategy == ONLY
    fresh = world.choose(Known())
    assert (fresh.strategy, fresh.decode.engine.name) == (FRESH, "decode-1")


@pytest.mark.parametrize(
    ("known", "why", "reason"),
    [
        (Known(named=False), Why.NO_SESSION, "the request names no session"),
        (Known(store_away=True), Why.STORE_AWAY, "the store does not answer"),
    ],
)
def test_what_is_not_known_is_said(world: World, known: Known, why: Why, reason: str) -> None:
    plan = world.choose(known)
    assert (plan.strategy, plan.why, plan.reason, plan.turn) == (FRESH, why, reason, 1)
