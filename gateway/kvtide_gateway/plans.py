"""The control plane over gRPC, and what to do when it does not answer."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from kvtide.keys import DEFAULT_TENANT
from kvtide.lease.v1 import directive_pb2
from kvtide.routing.v1 import routing_pb2 as pb
from kvtide.routing.v1 import routing_pb2_grpc
from kvtide.session.v1 import session_pb2, session_pb2_grpc
from kvtide_gateway.errors import ControlPlaneAway, NoEngine
from kvtide_gateway.known import KnownEngines
from kvtide_gateway.plan import Ask, Lease, Plan, PlannedEngine
from kvtide_gateway.strategy import Strategy
from kvtide_gateway.turns import EndedTurn, RecentTurns

AWAY = "control plane away"
_NO_DECODE_ENGINE = "NO_DECODE_ENGINE"


def channel(address: str, backoff: float) -> grpc.aio.Channel:
    """A channel that tries again within ``backoff`` seconds: gRPC's own default is two minutes."""
    most = max(100, round(backoff * 1000))
    options = [
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", most),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
    ]
    return grpc.aio.insecure_channel(address, options)


class ControlPlane:
    """Calls of the services. Every failure is an AioRpcError."""

    def __init__(
        self, routing: grpc.aio.Channel, sessions: grpc.aio.Channel, api_key: str, plan: float, record: float
    ) -> None:
        """``plan`` and ``record``: seconds that a call of the routing and of the session service may take."""
        self._routing: Any = routing_pb2_grpc.RoutingServiceStub(routing)
        self._sessions: Any = session_pb2_grpc.SessionServiceStub(sessions)
        self._api_key = api_key
        self._plan_timeout = plan
        self._record_timeout = record

    async def plan(self, ask: Ask, await_turn: int) -> Plan:
        """Routing's own plan."""
        request = pb.PlanRequest(
            model=ask.model,
            session_id=ask.session_id,
            await_turn=await_turn,
            force=_wire_strategy(ask.force),
            avoid_engines=sorted(ask.avoid),
        )
        metadata = self._metadata(ask.tenant)
        return _plan(await self._routing.Plan(request, metadata=metadata, timeout=self._plan_timeout))

    async def models(self) -> list[str]:
        """The models that decode engines serve."""
        request, metadata = pb.ListModelsRequest(), self._metadata(DEFAULT_TENANT)
        response = await self._routing.ListModels(request, metadata=metadata, timeout=self._plan_timeout)
        return list(response.models)

    async def record(self, turn: EndedTurn) -> bool:
        """Tells the session service of a turn; whether it worked."""
        request = session_pb2.RecordTurnRequest(
            session_id=turn.session_id,
            turn=turn.turn,
            model=turn.model,
            decode_engine=turn.decode.name,
            decode_boot_id=turn.decode.boot_id,
        )
        metadata = self._metadata(turn.tenant)
        try:
            await self._sessions.RecordTurn(request, metadata=metadata, timeout=self._record_timeout)
        except grpc.aio.AioRpcError:
            return False
        return True

    def _metadata(self, tenant: str) -> Sequence[tuple[str, str]]:
        key = [("authorization", f"Bearer {self._api_key}")] if self._api_key else []
        return [("x-kvtide-tenant", tenant), *key]


class Planner:
    """Routing's plans; while it is away, the engines of earlier ones, without reuse."""

    def __init__(self, services: ControlPlane, known: KnownEngines, recent: RecentTurns) -> None:
        self._services = services
        self._known = known
        self._recent = recent

    async def plan(self, ask: Ask) -> Plan:
        """Raises NoEngine, ControlPlaneAway."""
        if not ask.model:
            return self._without(ask, await self.any_decode(ask.avoid), "the request names no model")
        try:
            plan = await self._services.plan(ask, self._recent.unreported(ask.tenant, ask.session_id))
        except grpc.aio.AioRpcError as error:
            return await self._stand_in(ask, error)
        self._known.learn(ask.model, plan.decode)
        # The record of the last turn may still be on its way to the session service.
        turn = max(plan.turn, self._recent.last(ask.tenant, ask.session_id) + 1)
        return dataclasses.replace(plan, turn=turn)

    async def models(self) -> list[str]:
        """What routing says. Raises ControlPlaneAway."""
        try:
            return await self._services.models()
        except grpc.aio.AioRpcError as error:
            raise ControlPlaneAway(f"the routing service does not answer: {error.code().name}") from error

    def known_models(self) -> list[str]:
        """Models of earlier plans."""
        return self._known.models()

    async def any_decode(self, avoid: frozenset[str] = frozenset()) -> PlannedEngine | None:
        """Some decode engine, for requests that any can refuse in its own words."""
        found = self._known.any(avoid)
        return found or await self._discovered(avoid)

    async def _discovered(self, avoid: frozenset[str]) -> PlannedEngine | None:
        try:
            for model in await self._services.models():
                ask = Ask(DEFAULT_TENANT, model, force=Strategy.DECODE_ONLY, avoid=avoid)
                engine = (await self._services.plan(ask, 0)).decode
                self._known.learn(model, engine)
                return engine
        except grpc.aio.AioRpcError:
            return None
        return None

    async def _stand_in(self, ask: Ask, error: grpc.aio.AioRpcError) -> Plan:
        served = ask.model in self._known.models()
        if reason_of(error) != _NO_DECODE_ENGINE:
            engine = self._known.find(ask.model, ask.avoid) if served else self._known.any(ask.avoid)
            return self._without(ask, engine, AWAY)
        if served:
            return self._without(ask, self._known.find(ask.model, ask.avoid), "routing knows no decode engine now")
        return self._without(ask, await self.any_decode(ask.avoid), "no engine serves this model")

    def _without(self, ask: Ask, engine: PlannedEngine | None, reason: str) -> Plan:
        """D computes all. A D that serves no such model answers with its own error."""
        if engine is None and reason == AWAY and not self._known.models():
            raise ControlPlaneAway("the routing service does not answer and no engine is known yet; try again shortly")
        if engine is None:
            raise NoEngine("no decode engine can answer this request now; try again shortly")
        turn = self._recent.last(ask.tenant, ask.session_id) + 1
        return Plan(Strategy.DECODE_ONLY, reason, engine, turn=turn)


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The reason of kvtide.errors.v1 in an error's details; empty when there is none."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    return str(info.reason)
    return ""


def _wire_strategy(strategy: Strategy | None) -> "directive_pb2.Strategy.ValueType":
    return directive_pb2.Strategy.Value(f"STRATEGY_{strategy or 'UNSPECIFIED'}")


def _plan(wire: pb.PlanResponse) -> Plan:
    name = directive_pb2.Strategy.Name(wire.strategy).removeprefix("STRATEGY_")
    ref = wire.lease
    plan = Plan(
        strategy=Strategy(name) if name in set(Strategy) else Strategy.PREFILL_FRESH,
        reason=wire.reason,
        decode=_engine(wire.decode),
        prefill=_engine(wire.prefill) if wire.HasField("prefill") else None,
        lease=Lease(ref.lease_id, ref.epoch, ref.engine, ref.boot_id) if wire.HasField("lease") else None,
        lease_tokens=wire.lease_tokens,
        turn=wire.turn,
    )
    return plan.at_most(plan.strategy)


def _engine(wire: pb.PlannedEngine) -> PlannedEngine:
    engine = wire.engine
    return PlannedEngine(engine.name, engine.boot_id, engine.http_url, wire.clock_stamp)
