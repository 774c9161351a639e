"""The engine link against a real gRPC server: reports, asks, answers, and reconnection with a snapshot."""

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide.lease.v1 import lease_pb2_grpc
from kvtide_connector.dialogue import Dialogue
from kvtide_connector.holds import EndReason, Lease, Limits, Owner, Refusal
from kvtide_connector.lessor import Lessor
from kvtide_connector.link import EngineLink
from kvtide_connector.value import Worth

ENGINE = pb.Engine(name="decode-0", boot_id="boot", role=pb.ENGINE_ROLE_DECODE, block_size=32)


class Service(lease_pb2_grpc.LeaseServiceServicer):
    """Keeps what engines send; sends what a test puts into ``outbox``."""

    def __init__(self) -> None:
        self.inbox: queue.Queue[pb.AttachRequest] = queue.Queue()
        self.outbox: queue.Queue[pb.AttachResponse | None] = queue.Queue()

    def Attach(self, request_iterator: Iterator[pb.AttachRequest], context: Any) -> Iterator[pb.AttachResponse]:
        threading.Thread(target=self._take, args=(request_iterator,), daemon=True).start()
        while (message := self.outbox.get()) is not None:
            yield message

    def _take(self, requests: Iterator[pb.AttachRequest]) -> None:
        try:
            for message in requests:
                self.inbox.put(message)
        except grpc.RpcError:
            return
        self.outbox.put(None)

    def next(self, kind: str) -> Any:
        while True:
            message = self.inbox.get(timeout=10)
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)


class Pool:
    def pin(self, block_ids: Any) -> None: ...
    def unpin(self, block_ids: Any) -> None: ...
    def num_free(self) -> int:
        return 100

    def num_blocks(self) -> int:
        return 100


class Reports:
    """Forwards the rules' events."""

    def __init__(self, dialogue: Dialogue) -> None:
        self.dialogue = dialogue

    def granted(self, lease: Lease) -> None:
        self.dialogue.granted(lease)

    def changed(self, lease: Lease) -> None:
        self.dialogue.granted(lease)

    def ended(self, lease: Lease, reason: EndReason, continued: bool) -> None:
        self.dialogue.ended(lease, reason)

    def ticketed(self, refusal: Refusal | None) -> None: ...


class World:
    def __init__(self) -> None:
        self.service = Service()
        self.server = grpc.server(ThreadPoolExecutor(4))
        lease_pb2_grpc.add_LeaseServiceServicer_to_server(self.service, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.dialogue = Dialogue(ENGINE, lambda: 7, lambda: pb.Beat(free_blocks=5))
        ids, limits, worth = count(1), Limits(10**12, 10**12, 10**10, 0.5, 8), Worth(10**10, 1000)
        self.lessor = Lessor(Pool(), lambda: 7, limits, worth, lambda: f"lease-{next(ids)}", Reports(self.dialogue))
        self.dialogue.speaks_for(self.lessor)
        self.link = EngineLink(self.dialogue, f"127.0.0.1:{port}", "", 0.05)

    def hold(self, letters: str) -> Lease:
        hashes = [letter.encode() * 32 for letter in letters]
        return self.lessor.grant(Owner("acme", "s1"), 1, hashes, range(len(letters)))

    def stop(self) -> None:
        self.link.close()
        self.service.outbox.put(None)
        self.server.stop(0).wait(5)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.stop()


def test_says_hello_with_everything_held_then_beats(world: World) -> None:
    lease = world.hold("ab")
    world.link.start()
    hello = world.service.next("hello")
    assert (hello.protocol_version, hello.engine.name) == (2, "decode-0")
    assert [held.lease_id for held in hello.leases] == [lease.lease_id]
    assert hello.leases[0].num_tokens == 64
    beat = world.service.next("beat")
    assert (beat.clock_stamp, beat.free_blocks) == (7, 5)


def test_reports_grants_and_ends(world: World) -> None:
    world.link.start()
    world.service.next("hello")
    lease = world.hold("ab")
    assert world.service.next("granted").lease_id == lease.lease_id
    world.lessor.release(lease.lease_id)
    ended = world.service.next("ended")
    assert (ended.lease_id, ended.reason) == (lease.lease_id, pb.LEASE_END_REASON_RELEASED)


def request(boot_id: str = "boot") -> pb.TicketRequest:
    return pb.TicketRequest(
        ticket_id="t1",
        tenant="acme",
        session_id="s1",
        boot_id=boot_id,
        prompt_hash_prefixes=b"a" * 8 + b"b" * 8,
        duration=Duration(seconds=3),
    )


def test_a_holder_answers_with_blocks_and_full_hashes(world: World) -> None:
    world.hold("abc")
    world.link.start()
    world.service.outbox.put(pb.AttachResponse(ticket_request=request()))
    response = world.service.next("ticket_response")
    assert list(response.block_ids) == [0, 1]
    assert list(response.block_hashes) == [b"a" * 32, b"b" * 32]
    assert response.holder.name == "decode-0"
    assert response.duration.seconds == 3


def test_a_holder_of_another_boot_refuses(world: World) -> None:
    world.hold("abc")
    world.link.start()
    world.service.outbox.put(pb.AttachResponse(ticket_request=request("older")))
    assert world.service.next("ticket_response").refusal == pb.TICKET_REFUSAL_RESTARTED


def test_an_ask_gets_its_answer(world: World) -> None:
    world.link.start()
    future = world.dialogue.ask(request())
    assert world.service.next("ticket_request").ticket_id == "t1"
    world.service.outbox.put(pb.AttachResponse(ticket_response=pb.TicketResponse(ticket_id="t1", lease_id="l1")))
    assert future.result(timeout=10).lease_id == "l1"


def test_an_answer_after_the_ask_was_given_up_is_given_back(world: World) -> None:
    world.link.start()
    world.dialogue.ask(request())
    world.dialogue.done("t1", "decode-0")
    world.service.next("ticket_release")
    late = pb.TicketResponse(ticket_id="t1", lease_id="l1", holder=ENGINE)
    world.service.outbox.put(pb.AttachResponse(ticket_response=late))
    assert world.service.next("ticket_release").ticket_id == "t1"


def test_reconnects_with_a_fresh_snapshot(world: World) -> None:
    world.link.start()
    world.service.next("hello")
    lease = world.hold("ab")
    world.service.outbox.put(None)
    hello = world.service.next("hello")
    assert [held.lease_id for held in hello.leases] == [lease.lease_id]


def test_what_is_reported_while_the_snapshot_is_taken_follows_the_hello(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = world.lessor.leases

    def take_and_hold() -> list[Lease]:
        leases = take()
        world.hold("ab")
        return leases

    monkeypatch.setattr(world.lessor, "leases", take_and_hold)
    world.link.start()
    assert world.service.inbox.get(timeout=10).WhichOneof("message") == "hello"
    assert world.service.next("granted").num_tokens == 64


def test_a_message_that_cannot_be_handled_does_not_end_the_link(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(lease_id: str, epoch: int = 0) -> bool:
        raise RuntimeError("boom")

    monkeypatch.setattr(world.lessor, "release", broken)
    world.link.start()
    world.service.next("hello")
    world.service.outbox.put(pb.AttachResponse(release=pb.LeaseRelease(lease_id="l1")))
    world.service.outbox.put(None)
    assert world.service.next("hello").engine.name == "decode-0"


def test_a_hello_lists_what_ended_lately_with_its_reason(world: World) -> None:
    lease = world.hold("abc")
    world.lessor.release(lease.lease_id)
    world.link.start()
    (ended,) = world.service.next("hello").ended
    assert (ended.lease_id, ended.epoch, ended.num_tokens) == (lease.lease_id, lease.epoch, 3 * ENGINE.block_size)
    assert ended.reason == pb.LEASE_END_REASON_RELEASED


def test_renewals_are_obeyed_each_for_its_epoch_and_reported(world: World) -> None:
    lease = world.hold("abc")
    world.link.start()
    world.service.next("hello")
    span = Duration(seconds=900)
    stale = pb.LeaseRenewal(lease_id=lease.lease_id, ttl=Duration(seconds=999), epoch=lease.epoch + 1)
    good = pb.LeaseRenewal(lease_id=lease.lease_id, ttl=span, epoch=lease.epoch)
    world.service.outbox.put(pb.AttachResponse(renewals=pb.LeaseRenewals(renewals=[stale, good])))
    world.lessor.release(world.hold("xyz").lease_id)
    reports = [world.service.next("granted") for _ in range(2)]
    renewed = next(report for report in reports if report.lease_id == lease.lease_id)
    assert (renewed.ttl, renewed.granted_ttl) == (Duration(seconds=1000), Duration(seconds=1000))


def test_a_goodbye_is_the_last_word(world: World) -> None:
    world.link.start()
    world.service.next("hello")
    world.link.close()
    world.service.next("goodbye")
    world.hold("abc")
    assert world.service.inbox.empty()


def test_close_ends_the_thread_at_once(world: World) -> None:
    world.link.start()
    world.service.next("hello")
    world.link.close()
    assert not world.link._thread.is_alive()
