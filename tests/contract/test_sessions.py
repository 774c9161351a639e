"""Session leases over gRPC."""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from kvtide.lease.v1 import lease_pb2
from kvtide.session.v1 import session_pb2 as pb


class Sessions:
    """The calls of one client, in short."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.stub = client.sessions

    async def create(self, session_id: str = "s1", **fields: Any) -> Any:
        request = pb.CreateSessionRequest(session_id=session_id, **fields)
        return (await self.client.call(self.stub.CreateSession, request)).session

    async def get(self, session_id: str = "s1") -> Any:
        return (await self.client.call(self.stub.GetSession, pb.GetSessionRequest(session_id=session_id))).session

    async def close(self, session_id: str = "s1") -> None:
        await self.client.call(self.stub.CloseSession, pb.CloseSessionRequest(session_id=session_id))

    async def renew(self, session_id: str = "s1", **fields: Any) -> int:
        request = pb.RenewSessionRequest(session_id=session_id, **fields)
        return int((await self.client.call(self.stub.RenewSession, request)).ttl.seconds)

    async def record(self, turn: int, session_id: str = "s1") -> int:
        request = pb.RecordTurnRequest(
            session_id=session_id, turn=turn, model="m", decode_engine="decode-0", decode_boot_id="decode-0-1"
        )
        return int((await self.client.call(self.stub.RecordTurn, request)).ttl.seconds)

    async def list(self, size: int = 0, token: str = "") -> Any:
        return await self.client.call(self.stub.ListSessions, pb.ListSessionsRequest(page_size=size, page_token=token))

    def watch(self, token: str = "") -> Any:
        return self.stub.WatchSessions(
            pb.WatchSessionsRequest(resume_token=token), metadata=self.client.metadata, timeout=20
        )


async def events(watch: Any, count: int) -> list[str]:
    """The next events of a watch, past checkpoints."""
    found: list[str] = []
    while len(found) < count:
        message = await watch.read()
        if message.HasField("event"):
            kind = pb.SessionEventType.Name(message.event.type).removeprefix("SESSION_EVENT_TYPE_")
            found.append(f"{kind} {message.event.session_id}")
    return found


@pytest.fixture
def sessions(client: Any) -> Sessions:
    return Sessions(client)


async def test_a_session_from_its_opening_to_its_end(sessions: Sessions, failure: Any) -> None:
    made = await sessions.create(model="m", labels={"team": "a"}, request_id="r1", ttl=Duration(seconds=300))
    assert (made.session_id, made.tenant, made.model, dict(made.labels)) == ("s1", "acme", "m", {"team": "a"})
    assert (made.granted_ttl.seconds, made.turns) == (300, 0)
    assert 298 <= made.ttl.seconds <= 300
    assert (await sessions.create(request_id="r1")).granted_ttl.seconds == 300
    assert await sessions.renew(ttl=Duration(seconds=10)) >= 298
    assert await sessions.renew(ttl=Duration(seconds=10**6)) >= 3598
    assert await sessions.record(1) >= 3597
    found = await sessions.get()
    assert (found.turns, found.decode_engine, found.decode_boot_id) == (1, "decode-0", "decode-0-1")
    await sessions.close()
    assert (await failure(sessions.get()))[:2] == ("NOT_FOUND", "SESSION_NOT_FOUND")
    assert await failure(sessions.close()) == ("NOT_FOUND", "SESSION_NOT_FOUND", {"session_id": "s1"})


async def test_a_turn_opens_a_session_with_the_idle_ttl(sessions: Sessions) -> None:
    assert 58 <= await sessions.record(1) <= 60
    assert 58 <= await sessions.record(1) <= 60
    assert (await sessions.get()).turns == 1


async def test_closing_releases_the_blocks(services: Any, sessions: Sessions, lease: Any) -> None:
    link = await services.attach("decode-0", lease(), lease("other", session_id="s2"))
    await sessions.create()
    await sessions.close()
    assert (await link.read()).release == lease_pb2.LeaseRelease(lease_id="l1", epoch=1)


async def test_a_lapse_is_noticed_within_a_second_and_releases_the_blocks(
    services: Any, sessions: Sessions, lease: Any, age: Any
) -> None:
    link = await services.attach("decode-0", lease())
    await sessions.create(ttl=Duration(seconds=100))
    watch = sessions.watch((await sessions.list()).resume_token)
    await age(100)
    lapsed = asyncio.get_running_loop().time()
    assert await events(watch, 1) == ["LAPSED s1"]
    assert (await link.read()).release.lease_id == "l1"
    assert asyncio.get_running_loop().time() - lapsed < 1
    assert (await sessions.list()).sessions == []
    watch.cancel()


async def test_a_lost_session_is_an_answer_and_the_stream_stays_up(sessions: Sessions, client: Any) -> None:
    await sessions.create("a")
    await sessions.create("b")
    stream = client.sessions.KeepAlive(metadata=client.metadata, timeout=20)
    answers = []
    for ids in (["a", "lost", "b", ""], [], ["b", "a"]):
        await stream.write(pb.KeepAliveRequest(session_ids=ids))
        answers.append([(r.session_id, r.lost, r.ttl.seconds > 100) for r in (await stream.read()).results])
    assert answers == [
        [("a", False, True), ("lost", True, False), ("b", False, True), ("", True, False)],
        [],
        [("b", False, True), ("a", False, True)],
    ]
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


async def test_many_sessions_are_kept_alive_by_one_message(sessions: Sessions, client: Any, failure: Any) -> None:
    await sessions.create("s9999")
    stream = client.sessions.KeepAlive(metadata=client.metadata, timeout=20)
    await stream.write(pb.KeepAliveRequest(session_ids=[f"s{number}" for number in range(10_000)]))
    results = (await stream.read()).results
    assert [r.session_id for r in results if not r.lost] == ["s9999"]
    assert len(results) == 10_000
    await stream.write(pb.KeepAliveRequest(session_ids=["s"] * 10_001))
    code, reason, metadata = await failure(stream.read())
    assert (code, reason, metadata["field"]) == ("INVALID_ARGUMENT", "INVALID_FIELD", "session_ids")


async def test_sessions_are_listed_page_by_page(sessions: Sessions) -> None:
    for name in "edcba":
        await sessions.create(name)
    pages, token = [], ""
    for _ in range(3):
        answer = await sessions.list(2, token)
        pages.append([session.session_id for session in answer.sessions])
        token = answer.next_page_token
    assert (pages, token) == ([["a", "b"], ["c", "d"], ["e"]], "")


async def test_a_watch_resumes_where_it_was_and_sends_checkpoints(sessions: Sessions) -> None:
    await sessions.create("before")
    watch = sessions.watch((await sessions.list()).resume_token)
    await sessions.create("s1")
    first = await watch.read()
    assert first.event.session_id == "s1"
    checkpoint = await watch.read()
    assert not checkpoint.HasField("event") and checkpoint.resume_token == first.resume_token
    watch.cancel()
    await sessions.record(1)
    await sessions.close()
    again = sessions.watch(checkpoint.resume_token)
    assert await events(again, 2) == ["TURN s1", "CLOSED s1"]
    again.cancel()


async def test_a_watch_without_a_token_starts_now(sessions: Sessions) -> None:
    await sessions.create("before")
    watch = sessions.watch()
    assert not (await watch.read()).HasField("event")
    await sessions.create("after")
    assert await events(watch, 1) == ["OPENED after"]
    watch.cancel()


async def test_a_watch_survives_a_restart_of_the_service(services: Any, sessions: Sessions) -> None:
    watch = sessions.watch((await sessions.list()).resume_token)
    await sessions.create("s1")
    token = (await watch.read()).resume_token
    await services.stop()
    with pytest.raises(grpc.aio.AioRpcError):
        await events(watch, 1)
    await services.start()
    await sessions.create("s2")
    again = sessions.watch(token)
    assert await events(again, 1) == ["OPENED s2"]
    again.cancel()


async def test_after_a_flush_a_watch_must_list_again_and_a_turn_brings_the_session_back(
    services: Any, sessions: Sessions, lease: Any, valkey: Any, failure: Any
) -> None:
    await services.attach("decode-0", lease(turn=3))
    await sessions.record(3)
    token = (await sessions.list()).resume_token
    await valkey.flushall()
    assert (await failure(sessions.get()))[1] == "SESSION_NOT_FOUND"
    code, reason, metadata = await failure(events(sessions.watch(token), 1))
    assert (code, reason, metadata) == ("INVALID_ARGUMENT", "INVALID_TOKEN", {"field": "resume_token"})
    await sessions.record(4)
    assert (await sessions.get()).turns == 4


async def test_without_the_store_calls_say_so(sessions: Sessions, valkey: Any, failure: Any) -> None:
    await valkey.client_pause(1000)
    assert await failure(sessions.create()) == ("UNAVAILABLE", "STORE_UNAVAILABLE", {})


async def test_another_request_cannot_open_a_live_session(sessions: Sessions, failure: Any) -> None:
    await sessions.create(request_id="r1")
    expected = ("ALREADY_EXISTS", "SESSION_EXISTS", {"session_id": "s1"})
    assert await failure(sessions.create(request_id="r2")) == expected


@pytest.mark.parametrize(
    ("call", "reason", "field"),
    [
        (lambda s: s.create(ttl=Duration(seconds=0)), "INVALID_FIELD", "ttl"),
        (lambda s: s.create(ttl=Duration(seconds=-5)), "INVALID_FIELD", "ttl"),
        (lambda s: s.create(ttl=Duration(seconds=2**62)), "INVALID_FIELD", "ttl"),
        (lambda s: s.create("x" * 257), "INVALID_FIELD", "session_id"),
        (lambda s: s.create(request_id="x" * 129), "INVALID_FIELD", "request_id"),
        (lambda s: s.create(labels={"k" * 64: ""}), "INVALID_FIELD", "labels"),
        (lambda s: s.get(""), "INVALID_FIELD", "session_id"),
        (lambda s: s.renew(ttl=Duration(seconds=-1)), "INVALID_FIELD", "ttl"),
        (lambda s: s.record(0), "INVALID_FIELD", "turn"),
        (lambda s: s.record(2**62), "INVALID_FIELD", "turn"),
        (lambda s: s.list(-1), "INVALID_FIELD", "page_size"),
        (lambda s: s.list(0, "nonsense"), "INVALID_TOKEN", "page_token"),
        (lambda s: events(s.watch("nonsense"), 1), "INVALID_TOKEN", "resume_token"),
    ],
)
async def test_bad_input(sessions: Sessions, failure: Any, call: Any, reason: str, field: str) -> None:
    code, got, metadata = await failure(call(sessions))
    assert (code, got, metadata["field"]) == ("INVALID_ARGUMENT", reason, field)
    assert (await sessions.list()).sessions == []
