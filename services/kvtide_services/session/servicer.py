"""gRPC in, rules out."""

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

from google.protobuf.duration_pb2 import Duration

from kvtide.session.v1 import session_pb2 as pb
from kvtide.session.v1 import session_pb2_grpc
from kvtide_services.session.keeper import SessionKeeper
from kvtide_services.store import SessionEvent, SessionRecord, SessionStore, TurnRecord
from kvtide_services.transport.calls import caller_of, open_token, page_size, require, seal_token

MAX_KEEP_ALIVE = 10_000
_KINDS = {
    "opened": pb.SESSION_EVENT_TYPE_OPENED,
    "turn": pb.SESSION_EVENT_TYPE_TURN,
    "closed": pb.SESSION_EVENT_TYPE_CLOSED,
    "lapsed": pb.SESSION_EVENT_TYPE_LAPSED,
}


class SessionServicer(session_pb2_grpc.SessionServiceServicer):
    """kvtide.session.v1.SessionService."""

    def __init__(self, keeper: SessionKeeper, store: SessionStore, checkpoint: timedelta) -> None:
        self._keeper = keeper
        self._store = store
        self._checkpoint = checkpoint

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Any) -> pb.CreateSessionResponse:
        ttl, labels = _span(request, "ttl"), dict(request.labels)
        record = await self._keeper.create(
            caller_of(context).tenant, request.session_id, ttl, request.model, labels, request.request_id
        )
        return pb.CreateSessionResponse(session=message(record))

    async def GetSession(self, request: pb.GetSessionRequest, context: Any) -> pb.GetSessionResponse:
        record = await self._keeper.get(caller_of(context).tenant, request.session_id)
        return pb.GetSessionResponse(session=message(record))

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Any) -> pb.ListSessionsResponse:
        tenant, size = caller_of(context).tenant, page_size(request.page_size)
        # Before the page: a watch from here on misses nothing that happens after it.
        resume = await self._store.last_token(tenant)
        records, more = await self._store.page(tenant, open_token(request.page_token), size)
        token = seal_token(more) if more else ""
        return pb.ListSessionsResponse(sessions=map(message, records), next_page_token=token, resume_token=resume)

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Any) -> pb.CloseSessionResponse:
        await self._keeper.close(caller_of(context).tenant, request.session_id)
        return pb.CloseSessionResponse()

    async def RenewSession(self, request: pb.RenewSessionRequest, context: Any) -> pb.RenewSessionResponse:
        left = await self._keeper.renew(caller_of(context).tenant, request.session_id, _span(request, "ttl"))
        return pb.RenewSessionResponse(ttl=_duration(left))

    async def KeepAlive(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.KeepAliveResponse]:
        tenant = caller_of(context).tenant
        async for request in request_iterator:
            asked = list(request.session_ids)
            require(len(asked) <= MAX_KEEP_ALIVE, "session_ids", len(asked), f"at most {MAX_KEEP_ALIVE}")
            renewed = await self._keeper.keep_alive(tenant, asked)
            yield pb.KeepAliveResponse(results=[_result(i, left) for i, left in renewed])

    async def WatchSessions(
        self, request: pb.WatchSessionsRequest, context: Any
    ) -> AsyncIterator[pb.WatchSessionsResponse]:
        tenant = caller_of(context).tenant
        token = request.resume_token or await self._store.last_token(tenant)
        while True:
            events = await self._store.events(tenant, token, self._checkpoint)
            for event in events:
                token = event.token
                yield pb.WatchSessionsResponse(resume_token=token, event=_event(event))
            if not events:
                yield pb.WatchSessionsResponse(resume_token=token)

    async def RecordTurn(self, request: pb.RecordTurnRequest, context: Any) -> pb.RecordTurnResponse:
        turn = TurnRecord(request.turn, request.model, request.decode_engine, request.decode_boot_id)
        left = await self._keeper.record_turn(caller_of(context).tenant, request.session_id, turn)
        return pb.RecordTurnResponse(ttl=_duration(left))


def message(record: SessionRecord) -> pb.Session:
    """A record as clients see it."""
    return pb.Session(
        session_id=record.session_id,
        tenant=record.tenant,
        ttl=_duration(record.ttl),
        granted_ttl=_duration(record.granted_ttl),
        model=record.model,
        turns=record.turns,
        decode_engine=record.decode_engine,
        decode_boot_id=record.decode_boot_id,
        idle=_duration(record.idle),
        labels=record.labels,
    )


def _duration(span: timedelta) -> Duration:
    result = Duration()
    result.FromTimedelta(span)
    return result


def _span(request: Any, field: str) -> timedelta | None:
    if not request.HasField(field):
        return None
    try:
        span: timedelta = getattr(request, field).ToTimedelta()
    except (OverflowError, ValueError):
        require(False, field, getattr(request, field).seconds, "a span of time")
    return span


def _result(session_id: str, left: timedelta | None) -> pb.KeepAliveResult:
    return pb.KeepAliveResult(session_id=session_id, ttl=_duration(left or timedelta(0)), lost=left is None)


def _event(event: SessionEvent) -> pb.SessionEvent:
    # A later version may have written kinds that this one does not know.
    kind = _KINDS.get(event.kind, pb.SESSION_EVENT_TYPE_UNSPECIFIED)
    return pb.SessionEvent(type=kind, session_id=event.session_id)
