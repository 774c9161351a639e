"""Engines, control plane and gateway in one process, each on its own free port."""

import asyncio
import contextlib
import io
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
import pytest
import uvicorn
from aiohttp import web
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from kvtide import directive as directives
from kvtide.lease.v1 import directive_pb2, lease_pb2
from kvtide.routing.v1 import routing_pb2, routing_pb2_grpc
from kvtide.session.v1 import session_pb2, session_pb2_grpc
from kvtide_gateway.app import build
from kvtide_gateway.config import GatewaySettings

KEY = b"shared"
MODEL = "tiny"
STAMP = 4711
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """A request that an engine got."""

    path: str
    headers: Any
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def directive(self) -> directive_pb2.TurnDirective:
        """Checked against the shared key."""
        return directives.decode(self.body["kv_transfer_params"]["kvtide"], KEY)


def prefill_answer(reused: int = 96, reason: str = "") -> dict[str, Any]:
    """What P's connector exports."""
    facts = {
        "num_tokens": 130,
        "last_block_hash": "ab" * 32,
        "tail_token_ids": [5, 6],
        "lease_duration_s": 30.5,
        "pairing_digest": "pair",
        "reused_tokens": reused,
        "reason": reason,
    }
    stock = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[7]], "remote_engine_id": "p1"}
    return {"id": "x", "choices": [], "kv_transfer_params": {**stock, "kvtide_prefill": facts}}


class FakeEngine:
    """Answers from a script of handlers, then by default."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.script: list[Handler] = []
        self.default: Handler = self.complete
        self.cancelled = asyncio.Event()
        self.reached = asyncio.Event()
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(Seen(request.path, request.headers, await request.read()))
        handler = self.script.pop(0) if self.script else self.default
        try:
            return await handler(request)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """As D answers: streamed or not, or a JSON error."""
        try:
            body = json.loads(await request.read())
        except ValueError:
            return web.json_response({"error": {"message": "engine: not JSON", "code": 400}}, status=400)
        if body.get("model") != MODEL:
            return web.json_response({"error": {"message": "engine: no such model", "code": 404}}, status=404)
        if not body.get("stream"):
            return web.Response(body=WHOLE, content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for event in EVENTS:
            await response.write(event)
        return response

    async def prefill(self, request: web.Request) -> web.StreamResponse:
        """As P answers."""
        return web.json_response(prefill_answer())

    async def hang(self, request: web.Request) -> web.StreamResponse:
        """Never answers."""
        self.reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    def status(self, code: int, text: str = "engine says no") -> Handler:
        """Answers with a status and an OpenAI error."""

        async def handle(request: web.Request) -> web.StreamResponse:
            return web.json_response({"error": {"message": text, "code": code}}, status=code)

        return handle

    def json(self, value: Any) -> Handler:
        """Answers 200 with a JSON value."""

        async def handle(request: web.Request) -> web.StreamResponse:
            return web.json_response(value)

        return handle

    async def drop(self, request: web.Request) -> web.StreamResponse:
        """Closes the connection without a word."""
        assert request.transport is not None
        request.transport.abort()
        return web.Response()


def _event(text: str) -> bytes:
    delta = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    chunk = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [delta]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


EVENTS = [_event("Hel"), _event("lo"), b"data: [DONE]\n\n"]
WHOLE = (
    b'{"id":"c1","object":"chat.completion","created":1,"model":"tiny","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"Hello"},"finish_reason":"stop","logprobs":null}],  "usage":'
    b'{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3},"odd_spacing" : [1 , 2]}'
)


@dataclass
class FakeControl(routing_pb2_grpc.RoutingServiceServicer, session_pb2_grpc.SessionServiceServicer):
    """Routing and session services: plans as told, records turns."""

    prefills: dict[str, str] = field(default_factory=dict)
    decodes: dict[str, str] = field(default_factory=dict)
    strategy: str = "PREFILL_REUSE"
    reason: str = "d1 holds 96 tokens"
    turn: int = 1
    plans: list[Any] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    planning: asyncio.Event = field(default_factory=asyncio.Event)
    recorded: asyncio.Event = field(default_factory=asyncio.Event)
    hold_plans: asyncio.Event | None = None
    record_error: bool = False
    address: str = ""
    _server: Any = None

    async def start(self, address: str = "127.0.0.1:0") -> None:
        self._server = grpc.aio.server()
        routing_pb2_grpc.add_RoutingServiceServicer_to_server(self, self._server)
        session_pb2_grpc.add_SessionServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def Plan(self, request: Any, context: Any) -> Any:
        self.plans.append(request)
        self.planning.set()
        self.metadata.append(dict(context.invocation_metadata()))
        if self.hold_plans is not None:
            await self.hold_plans.wait()
        decodes = [name for name in self.decodes if name not in request.avoid_engines]
        prefills = [name for name in self.prefills if name not in request.avoid_engines]
        if request.model != MODEL or not decodes:
            await _abort(context, "NO_DECODE_ENGINE", f"no decode engine serves model {request.model!r}")
        return self._plan(request, decodes[0], prefills[0] if prefills else None)

    def _plan(self, request: Any, decode: str, prefill: str | None) -> Any:
        forced = directive_pb2.Strategy.Name(request.force).removeprefix("STRATEGY_")
        strategy = self.strategy if forced == "UNSPECIFIED" else forced
        if prefill is None and strategy.startswith("PREFILL"):
            strategy = "DECODE_ONLY"
        plan = routing_pb2.PlanResponse(
            strategy=directive_pb2.Strategy.Value(f"STRATEGY_{strategy}"),
            reason=self.reason,
            decode=_planned(decode, self.decodes[decode], lease_pb2.ENGINE_ROLE_DECODE),
            turn=self.turn,
        )
        if prefill is not None and strategy.startswith("PREFILL"):
            plan.prefill.CopyFrom(_planned(prefill, self.prefills[prefill], lease_pb2.ENGINE_ROLE_PREFILL))
        if strategy in ("PREFILL_REUSE", "DECODE_DIRECT"):
            ref = directive_pb2.LeaseRef(lease_id="l1", epoch=3, engine=decode, boot_id=f"{decode}-boot")
            plan.lease.CopyFrom(ref)
            plan.lease_tokens = 96
        return plan

    async def ListModels(self, request: Any, context: Any) -> Any:
        return routing_pb2.ListModelsResponse(models=[MODEL] if self.decodes else [])

    async def RecordTurn(self, request: Any, context: Any) -> Any:
        if self.record_error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the store does not answer")
        self.records.append((dict(context.invocation_metadata())["x-kvtide-tenant"], request))
        self.recorded.set()
        return session_pb2.RecordTurnResponse(ttl=Duration(seconds=60))


def _planned(name: str, url: str, role: Any) -> Any:
    engine = lease_pb2.Engine(name=name, boot_id=f"{name}-boot", role=role, model=MODEL, http_url=url)
    return routing_pb2.PlannedEngine(engine=engine, clock_stamp=STAMP)


async def _abort(context: Any, reason: str, message: str) -> None:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="kvtide"))
    code = grpc.StatusCode.UNAVAILABLE
    status = status_pb2.Status(code=code.value[0], message=message, details=[detail])
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    await context.abort(code, message)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to pytest."""
        yield


@dataclass
class Deployment:
    """One P, one D, the control plane, and the gateway when it is started."""

    prefill: FakeEngine
    decode: FakeEngine
    control: FakeControl
    http: aiohttp.ClientSession
    settings: dict[str, Any]
    url: str = ""
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    events: tuple[bytes, ...] = tuple(EVENTS)
    whole: bytes = WHOLE
    stamp: int = STAMP

    def prefill_answer(self, **facts: Any) -> dict[str, Any]:
        return prefill_answer(**facts)

    async def start(self, **settings: Any) -> None:
        """Starts the gateway."""
        address = self.control.address
        chosen = GatewaySettings(**{"routing_address": address, "session_address": address} | self.settings | settings)
        config = uvicorn.Config(
            build(chosen),
            loop="none",
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = _Server(config)
        task = asyncio.create_task(server.serve([listener]))

        async def stop() -> None:
            server.should_exit = True
            await task

        self.stack.push_async_callback(stop)
        await server.up.wait()

    async def another(self) -> FakeEngine:
        """One more engine, not yet registered."""
        engine = FakeEngine()
        await engine.start()
        self.stack.push_async_callback(engine.stop)
        return engine

    async def chat(self, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        """A chat completion: status, headers and body bytes."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.post("/v1/chat/completions", json.dumps(body).encode(), headers)

    async def post(self, path: str, raw: bytes, headers: dict[str, str] | None = None) -> Any:
        """The answer, with its bytes in ``.raw`` and its JSON, if it is some, in ``.body``."""
        sent = {"content-type": "application/json", **(headers or {})}
        async with self.http.post(self.url + path, data=io.BytesIO(raw), headers=sent) as response:
            return Got(response.status, response.headers, await response.read())

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Any:
        async with self.http.get(self.url + path, headers=headers) as response:
            return Got(response.status, response.headers, await response.read())

    async def metric(self, line: str) -> float:
        """The value of one sample."""
        text = (await self.get("/metrics")).raw.decode()
        return next((float(row.rpartition(" ")[2]) for row in text.splitlines() if row.startswith(f"{line} ")), 0.0)


@dataclass
class Got:
    """What a client got."""

    status: int
    headers: Any
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> Any:
        return self.body["error"]


@pytest.fixture
async def deployment(tmp_path: Any) -> AsyncIterator[Deployment]:
    """Everything but the gateway runs; ``await deployment.start(…)`` starts that."""
    (tmp_path / "key").write_bytes(KEY)
    prefill, decode = FakeEngine(), FakeEngine()
    control = FakeControl()  # type: ignore[abstract]  # the gateway calls none of the other methods
    prefill.default = prefill.prefill
    for part in (prefill, decode, control):
        await part.start()
    control.prefills["p1"], control.decodes["d1"] = prefill.url, decode.url
    async with aiohttp.ClientSession() as http:
        made = Deployment(prefill, decode, control, http, {"shared_key_file": str(tmp_path / "key")})
        async with made.stack:
            yield made
        for part in (prefill, decode, control):
            await part.stop()
