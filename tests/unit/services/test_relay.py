"""Tickets between links: every ask is answered once, by the engine that was asked or with a refusal."""

import asyncio
from typing import Any

import pytest

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_services.lease.relay import LocalRelay, Outbox


class World:
    """P asks, D holds."""

    def __init__(self, engine: Any, timeout: float) -> None:
        self.outcomes: list[str] = []
        self.relay = LocalRelay(timeout, self.outcomes.append)
        self.prefill, self.decode = engine("prefill-0"), engine("decode-0")
        self.reader, self.holder = self.box(), self.box()
        self.relay.join(self.prefill, self.reader)
        self.relay.join(self.decode, self.holder)

    def box(self, size: int = 100) -> Outbox:
        return asyncio.Queue(size)

    def ask(self, ticket_id: str = "t1", engine: str = "decode-0", boot_id: str = "decode-0-1") -> None:
        self.relay.ask(pb.TicketRequest(ticket_id=ticket_id, engine=engine, boot_id=boot_id), self.reader)

    def answer(self, ticket_id: str = "t1", **fields: Any) -> None:
        self.relay.answer(self.decode, pb.TicketResponse(ticket_id=ticket_id, **fields), self.holder)

    def read(self, box: Outbox) -> list[str]:
        """What waits in an outbox, in short."""
        said = []
        while not box.empty():
            message = box.get_nowait()
            kind = message.WhichOneof("message") if message else None
            detail = getattr(message, kind) if kind else None
            refusal = getattr(detail, "refusal", 0)
            said.append(f"{kind} {detail.ticket_id} {refusal}".strip() if detail else "end")
        return said


@pytest.fixture
async def world(engine: Any) -> World:
    return World(engine, timeout=30)


async def test_an_ask_reaches_the_holder_and_its_answer_the_reader(world: World) -> None:
    world.ask()
    assert world.read(world.holder) == ["ticket_request t1 0"]
    world.answer(lease_id="l1")
    assert world.read(world.reader) == ["ticket_response t1 0"]
    assert world.outcomes == ["granted"]


async def test_a_refusal_of_the_holder_is_passed_on(world: World) -> None:
    world.ask()
    world.answer(refusal=pb.TICKET_REFUSAL_TOO_MANY)
    assert world.read(world.reader) == [f"ticket_response t1 {pb.TICKET_REFUSAL_TOO_MANY}"]
    assert world.outcomes == ["too_many"]


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [({"engine": "decode-9"}, pb.TICKET_REFUSAL_UNREACHABLE), ({"boot_id": "old"}, pb.TICKET_REFUSAL_RESTARTED)],
)
async def test_a_holder_that_is_not_here_is_refused_at_once(world: World, asked: dict[str, str], refusal: int) -> None:
    world.ask(**asked)
    assert world.read(world.reader) == [f"ticket_response t1 {refusal}"]
    assert world.read(world.holder) == []


async def test_a_silent_holder_is_given_up_and_its_late_ticket_given_back(engine: Any) -> None:
    world = World(engine, timeout=0)
    world.ask()
    refused = await world.reader.get()
    assert refused is not None and refused.ticket_response.refusal == pb.TICKET_REFUSAL_UNREACHABLE
    world.answer(lease_id="l1")
    assert world.read(world.holder) == ["ticket_request t1 0", "ticket_release t1 0"]
    assert world.read(world.reader) == []
    assert world.outcomes == ["unreachable"]


async def test_a_late_refusal_needs_no_release(world: World) -> None:
    world.answer("unknown", refusal=pb.TICKET_REFUSAL_NOT_HELD)
    assert world.read(world.holder) == []


async def test_another_engine_cannot_answer_for_the_holder(world: World, engine: Any) -> None:
    world.ask()
    box = world.box()
    world.relay.answer(engine("decode-1"), pb.TicketResponse(ticket_id="t1", lease_id="forged"), box)
    assert world.read(world.reader) == []
    assert world.read(box) == ["ticket_release t1 0"]
    world.answer()
    assert world.read(world.reader) == ["ticket_response t1 0"]


async def test_when_the_holders_link_ends_its_asks_are_refused_at_once(world: World) -> None:
    world.ask()
    world.relay.leave(world.decode, world.holder)
    assert world.read(world.reader) == [f"ticket_response t1 {pb.TICKET_REFUSAL_UNREACHABLE}"]
    world.ask("t2")
    assert world.read(world.reader) == [f"ticket_response t2 {pb.TICKET_REFUSAL_UNREACHABLE}"]


async def test_a_ticket_for_a_reader_that_left_is_given_back(world: World) -> None:
    world.ask()
    world.relay.leave(world.prefill, world.reader)
    world.answer(lease_id="l1")
    assert world.read(world.holder) == ["ticket_request t1 0", "ticket_release t1 0"]


async def test_a_new_link_of_an_engine_ends_the_old_one_and_outlives_its_end(world: World) -> None:
    fresh = world.box()
    world.relay.join(world.decode, fresh)
    assert world.read(world.holder) == ["end"]
    world.relay.leave(world.decode, world.holder)
    world.ask()
    assert world.read(fresh) == ["ticket_request t1 0"]


async def test_an_ask_may_be_repeated(world: World) -> None:
    world.ask()
    world.ask()
    world.answer()
    assert world.read(world.reader) == ["ticket_response t1 0"]


async def test_a_link_that_does_not_read_is_ended(world: World, engine: Any) -> None:
    slow = world.box(2)
    world.relay.join(engine("decode-1"), slow)
    sent = [world.relay.send("decode-1", pb.AttachResponse(release=pb.LeaseRelease())) for _ in range(3)]
    assert sent == [True, True, False]
    assert world.read(slow) == ["end"]


async def test_a_gone_engine_is_dropped_but_not_its_successor(world: World, engine: Any) -> None:
    world.relay.drop(engine("decode-0", boot_id="older"))
    assert world.read(world.holder) == []
    world.relay.drop(world.decode)
    assert world.read(world.holder) == ["end"]


async def test_closing_ends_every_link(world: World) -> None:
    world.ask()
    world.relay.close()
    assert world.read(world.reader) == ["end"]
    assert world.read(world.holder) == ["end"]


async def test_a_refusal_of_a_later_version_is_counted(world: World) -> None:
    world.ask()
    response = pb.TicketResponse.FromString(pb.TicketResponse(ticket_id="t1").SerializeToString() + b"\x10\x63")
    world.relay.answer(world.decode, response, world.holder)
    assert world.outcomes == ["other"]
