"""/v1/chat/completions and /v1/completions."""

import uuid
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from kvtide.keys import Caller
from kvtide_gateway import bodies
from kvtide_gateway.asgi import ClientGone, header_text, read_body, unless_gone
from kvtide_gateway.auth import KeyRing
from kvtide_gateway.bodies import Malformed
from kvtide_gateway.config import RETENTIONS, GatewaySettings
from kvtide_gateway.errors import BadRequest, GatewayError, NotAllowed
from kvtide_gateway.legs import Answer, Engines, LegFailed
from kvtide_gateway.metrics import Metrics
from kvtide_gateway.plans import Planner
from kvtide_gateway.relay import relay
from kvtide_gateway.strategy import Strategy, named
from kvtide_gateway.turn import Trace, TurnRequest, TurnRunner
from kvtide_gateway.turns import EndedTurn

MAX_REQUEST_ID = 128


class Completions:
    """An ASGI endpoint."""

    def __init__(
        self,
        settings: GatewaySettings,
        keys: KeyRing,
        planner: Planner,
        engines: Engines,
        runner: TurnRunner,
        ended: Callable[[EndedTurn], None],
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._planner = planner
        self._engines = engines
        self._runner = runner
        self._ended = ended
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        caller = self._keys.caller(headers.get("authorization", ""))
        retain, force = self._retains(headers), self._force(headers, caller)
        raw = await read_body(scope, receive, self._settings.max_body_bytes)
        try:
            client = bodies.parse(raw, headers.get("x-session-id"))
        except Malformed as error:
            await unless_gone(receive, self._refuse(send, scope["path"], raw, headers, error))
            return
        turn = TurnRequest(scope["path"], client, caller.tenant, retain, force, _request_id(headers))
        trace = Trace()
        try:
            await unless_gone(receive, self._turn(send, turn, trace))
        except ClientGone:
            if not trace.whole:
                raise

    async def _turn(self, send: Send, turn: TurnRequest, trace: Trace) -> None:
        try:
            answer = await self._runner.run(turn, trace)
        except GatewayError as error:
            error.strategy, error.headers = trace.strategy, _headers(turn, trace)
            raise
        finally:
            self._metrics.turn(trace)
        self._metrics.answered(turn.path, trace.strategy, answer.status)
        await relay(send, answer, _headers(turn, trace), lambda: self._whole(turn, trace, answer))

    def _whole(self, turn: TurnRequest, trace: Trace, answer: Answer) -> None:
        trace.whole = True
        if turn.kept and trace.plan is not None and 200 <= answer.status < 300:
            plan, client = trace.plan, turn.client
            self._ended(EndedTurn(turn.tenant, client.session_id, plan.turn, client.model, plan.decode))

    async def _refuse(self, send: Send, path: str, raw: bytes, headers: Headers, malformed: Malformed) -> None:
        """The engine's own answer to what is no JSON object. Raises BadRequest when no engine gives one."""
        answer = await self._engines_word(path, raw, headers)
        if answer is None:
            raise BadRequest(str(malformed)) from malformed
        self._metrics.answered(path, "none", answer.status)
        await relay(send, answer, [(b"x-request-id", header_text(_request_id(headers)))], lambda: None)

    async def _engines_word(self, path: str, raw: bytes, headers: Headers) -> Answer | None:
        engine = await self._planner.any_decode()
        if engine is None:
            return None
        sent = {"content-type": headers.get("content-type", "application/json")}
        try:
            return await self._engines.decode(engine.url + path, raw, sent, streamed=True)
        except LegFailed as failure:
            return failure.answer

    def _retains(self, headers: Headers) -> bool:
        retention = headers.get("x-kvtide-retention", self._settings.retention)
        if retention not in RETENTIONS:
            raise BadRequest("X-Kvtide-Retention must be auto or none", param="X-Kvtide-Retention")
        return retention == "auto"

    def _force(self, headers: Headers, caller: Caller) -> Strategy | None:
        name = headers.get("x-kvtide-strategy", "")
        if name and not caller.operator:
            raise NotAllowed("only operators may force a strategy", param="X-Kvtide-Strategy")
        try:
            return named(name or self._settings.force_strategy)
        except ValueError as error:
            raise BadRequest(str(error), param="X-Kvtide-Strategy") from error


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    usable = 0 < len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable()
    return given if usable else uuid.uuid4().hex


def _headers(turn: TurnRequest, trace: Trace) -> list[tuple[bytes, bytes]]:
    timing = f"plan;dur={trace.plan_seconds * 1e3:.1f}, prefill;dur={trace.prefill_seconds * 1e3:.1f}"
    headers = [
        (b"x-kvtide-strategy", trace.strategy.encode()),
        (b"x-kvtide-reused-tokens", str(trace.reused).encode()),
        (b"x-kvtide-reason", header_text(trace.reason)),
        (b"x-kvtide-timing", timing.encode()),
        (b"x-request-id", header_text(turn.request_id)),
    ]
    session_id = turn.client.session_id
    return [*headers, (b"x-kvtide-session", header_text(session_id))] if session_id else headers
