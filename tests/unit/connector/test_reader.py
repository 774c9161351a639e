"""P's side of a read: what is asked for, what is verified, and that every path ends."""

from concurrent.futures import Future
from typing import cast

import pytest
from google.protobuf.duration_pb2 import Duration

from kvtide.lease.v1 import directive_pb2
from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_connector.clock import SECOND
from kvtide_connector.dialogue import Dialogue
from kvtide_connector.reader import Reader
from kvtide_connector.settings import ConnectorSettings
from kvtide_connector.turn import Load, Turn

BLOCK = 32


class FakeLink:
    def __init__(self) -> None:
        self.asked: list[pb.TicketRequest] = []
        self.over: list[tuple[str, str]] = []
        self.answer: Future[pb.TicketResponse] = Future()

    def ask(self, request: pb.TicketRequest) -> "Future[pb.TicketResponse]":
        self.asked.append(request)
        return self.answer

    def done(self, ticket_id: str, holder: str) -> None:
        self.over.append((ticket_id, holder))


class World:
    def __init__(self, prompt_tokens: int = 10 * BLOCK + 5) -> None:
        self.now = 1000 * SECOND
        self.link = FakeLink()
        self.prompt_tokens = prompt_tokens
        self.hashes = [bytes([i]) * 32 for i in range(prompt_tokens // BLOCK)]
        link = cast(Dialogue, self.link)
        self.reader = Reader(link, ConnectorSettings(), BLOCK, "digest", lambda: self.now, lambda: "t1")
        lease = directive_pb2.LeaseRef(lease_id="l1", epoch=3, engine="decode-0", boot_id="boot")
        self.turn = Turn(directive_pb2.TurnDirective(tenant="acme", session_id="s1", lease=lease))

    def ask(self) -> None:
        self.reader.ask(self.turn, self.hashes, self.prompt_tokens)

    def poll(self) -> bool:
        return self.reader.poll(self.turn, self.hashes, self.prompt_tokens, wait=0)

    def answer(self, hashes: list[bytes], blocks: int | None = None, digest: str = "digest") -> None:
        count = len(hashes) if blocks is None else blocks
        self.link.answer.set_result(
            pb.TicketResponse(
                ticket_id="t1",
                lease_id="l1",
                duration=Duration(seconds=30),
                block_ids=range(100, 100 + count),
                block_hashes=hashes,
                holder=pb.Engine(name="decode-0", pairing_digest=digest),
            )
        )


def test_asks_for_whole_blocks_but_never_the_whole_prompt() -> None:
    world = World(prompt_tokens=4 * BLOCK)
    world.ask()
    assert len(world.link.asked[0].prompt_hash_prefixes) == 3 * 8
    assert (world.link.asked[0].tenant, world.link.asked[0].session_id) == ("acme", "s1")


def test_a_prompt_below_the_threshold_asks_nothing() -> None:
    world = World(prompt_tokens=2 * BLOCK)
    world.ask()
    assert world.link.asked == []
    assert world.turn.load is Load.NONE
    assert "threshold" in world.turn.reason


def test_equal_blocks_are_read_and_the_last_token_is_computed() -> None:
    world = World(prompt_tokens=10 * BLOCK)
    world.ask()
    world.answer(world.hashes)
    assert world.poll()
    assert world.reader.count(world.turn, 0) == 9 * BLOCK
    assert world.turn.reason == ""


@pytest.mark.parametrize("wrong_at", [0, 3, 9])
def test_the_read_ends_at_the_first_block_that_differs_in_any_byte(wrong_at: int) -> None:
    world = World()
    world.ask()
    hashes = list(world.hashes)
    hashes[wrong_at] = hashes[wrong_at][:31] + b"\xff"
    world.answer(hashes)
    assert world.poll()
    expected = wrong_at * BLOCK if wrong_at * BLOCK >= 64 else 0
    assert world.reader.count(world.turn, 0) == expected


def test_local_blocks_are_not_read_again() -> None:
    world = World()
    world.ask()
    world.answer(world.hashes)
    world.poll()
    assert world.reader.count(world.turn, 4 * BLOCK) == 6 * BLOCK
    assert world.turn.local_blocks == 4


def test_too_little_beyond_the_local_blocks_is_computed_and_the_ticket_given_back() -> None:
    world = World()
    world.ask()
    world.answer(world.hashes)
    world.poll()
    assert world.reader.count(world.turn, 9 * BLOCK) == 0
    assert world.turn.load is Load.OVER
    assert world.link.over == [("t1", "decode-0")]


def test_a_refusal_names_its_reason() -> None:
    world = World()
    world.ask()
    world.link.answer.set_result(pb.TicketResponse(ticket_id="t1", refusal=pb.TICKET_REFUSAL_RESTARTED))
    assert world.poll()
    assert world.turn.load is Load.OVER
    assert world.turn.reason == "ticket refused: restarted"


def test_a_silent_holder_is_waited_for_until_the_deadline_only() -> None:
    world = World()
    world.ask()
    world.now += SECOND - 1
    assert not world.poll()
    world.now += 1
    assert world.poll()
    assert world.turn.load is Load.OVER
    assert world.link.over == [("t1", "decode-0")]


def test_other_weights_are_never_read() -> None:
    world = World()
    world.ask()
    world.answer(world.hashes, digest="another")
    assert world.poll()
    assert world.reader.count(world.turn, 0) == 0
    assert "other weights" in world.turn.reason


def test_a_ticket_with_fewer_blocks_than_hashes_is_not_used() -> None:
    world = World()
    world.ask()
    world.answer(world.hashes, blocks=3)
    assert world.poll()
    assert world.reader.count(world.turn, 0) == 0
    assert world.turn.reason == "malformed ticket"


def test_the_deadline_counts_from_the_ask_and_ends_before_the_holders() -> None:
    world = World()
    world.ask()
    asked, world.now = world.now, world.now + SECOND // 2
    world.answer(world.hashes)
    world.poll()
    assert world.turn.deadline <= asked + 30 * SECOND - 30 * SECOND // 100 - SECOND // 2
    world.now = world.turn.deadline
    assert world.reader.count(world.turn, 0) == 0
    assert world.turn.load is Load.OVER
