"""One turn: from the plan down the ladder until an answer begins. Knows neither gRPC nor protobuf nor ASGI."""

import dataclasses
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtide_gateway import bodies
from kvtide_gateway.bodies import ClientRequest
from kvtide_gateway.errors import ControlPlaneAway, EngineFailed, EngineTimedOut, GatewayError, NoEngine
from kvtide_gateway.legs import Answer, Cause, Engines, Leg, LegFailed
from kvtide_gateway.params import Attempt, MalformedReference, Prefilled, Signer, prefilled
from kvtide_gateway.plan import Ask, Plan
from kvtide_gateway.strategy import Strategy


@dataclass(frozen=True)
class TurnRequest:
    """A client's request and what the gateway knows about it."""

    path: str
    client: ClientRequest
    tenant: str
    retain: bool
    force: Strategy | None
    request_id: str

    @property
    def kept(self) -> bool:
        """Whether D is asked to keep the blocks."""
        return self.retain and bool(self.client.session_id) and not self.client.undivided


@dataclass
class Trace:
    """How a turn ran, for headers and metrics. Seconds; 0.0 is a stage that did not run."""

    plan: Plan | None = None
    strategy: str = "none"
    reason: str = ""
    reused: int = 0
    plan_seconds: float = 0.0
    prefill_seconds: float = 0.0
    first_byte_seconds: float = 0.0
    falls: list[tuple[str, str]] = field(default_factory=list)
    """Strategy and cause of each rung that failed."""
    whole: bool = False
    """The engine has said all; a client that leaves now misses nothing."""

    def begin(self, plan: Plan, reason: str) -> None:
        """A rung is tried."""
        self.plan, self.strategy, self.reason, self.reused = plan, str(plan.strategy), reason, 0


class Plans(Protocol):
    """Where plans come from."""

    def plan(self, ask: Ask) -> Awaitable[Plan]:
        """Raises NoEngine, ControlPlaneAway."""


@dataclass
class _Failures:
    """Which engines failed this request, and how often."""

    count: int = 0
    decodes: dict[str, int] = field(default_factory=dict)
    avoid: set[str] = field(default_factory=set)

    def add(self, plan: Plan, failure: LegFailed) -> None:
        self.count += 1
        if failure.leg is Leg.DECODE:
            self.decodes[plan.decode.name] = self.decodes.get(plan.decode.name, 0) + 1
            self.avoid.add(plan.decode.name)
        elif failure.cause.engine_is_gone and plan.prefill is not None:
            self.avoid.add(plan.prefill.name)


class TurnRunner:
    """Drives P then D as planned. A rung that fails before the answer begins gives way to one below, never above."""

    def __init__(
        self,
        planner: Plans,
        engines: Engines,
        signer: Signer,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        max_attempts: int,
    ) -> None:
        """``clock`` in seconds, for the trace only."""
        self._planner = planner
        self._engines = engines
        self._signer = signer
        self._clock = clock
        self._new_id = new_id
        self._max_attempts = max_attempts

    async def run(self, turn: TurnRequest, trace: Trace) -> Answer:
        """An engine's answer, begun; the caller closes it. Raises NoEngine, ControlPlaneAway, EngineFailed,
        EngineTimedOut."""
        force = Strategy.DECODE_ONLY if turn.client.undivided else turn.force
        plan = await self._plan(turn, trace, force, frozenset())
        trace.begin(plan, turn.client.undivided or plan.reason)
        failures = _Failures()
        while True:
            try:
                return await self._attempt(turn, plan, trace)
            except LegFailed as failure:
                trace.falls.append((trace.strategy, str(failure.cause)))
                failures.add(plan, failure)
                next_plan = await self._below(turn, plan, trace, failure, failures)
                if next_plan is None:
                    return _end(failure)
                trace.begin(next_plan, f"{failure} ({plan.strategy} failed)")
                plan = next_plan

    async def _plan(self, turn: TurnRequest, trace: Trace, force: Strategy | None, avoid: frozenset[str]) -> Plan:
        started = self._clock()
        client = turn.client
        plan = await self._planner.plan(Ask(turn.tenant, client.model, client.session_id, force, avoid))
        trace.plan_seconds += self._clock() - started
        return plan.at_most(Strategy.DECODE_ONLY) if force is Strategy.DECODE_ONLY else plan

    async def _below(
        self, turn: TurnRequest, plan: Plan, trace: Trace, failure: LegFailed, failures: _Failures
    ) -> Plan | None:
        """What to try next; None when nothing is left."""
        if failures.count >= self._max_attempts:
            return None
        if failure.leg is Leg.DECODE:
            return await self._elsewhere(turn, plan, trace, failure, failures)
        below = Strategy.DECODE_ONLY if failure.cause is Cause.NO_REFERENCE else plan.strategy.below
        if failure.cause.engine_is_gone and below is not Strategy.DECODE_ONLY:
            return await self._another_prefill(turn, plan, trace, below, failures)
        return plan.at_most(below)

    async def _another_prefill(
        self, turn: TurnRequest, plan: Plan, trace: Trace, below: Strategy, failures: _Failures
    ) -> Plan:
        try:
            found = await self._plan(turn, trace, below, frozenset(failures.avoid))
        except (NoEngine, ControlPlaneAway):
            return plan.at_most(Strategy.DECODE_ONLY)
        gone = found.prefill is not None and found.prefill.name in failures.avoid
        return found.at_most(Strategy.DECODE_ONLY if gone else below)

    async def _elsewhere(
        self, turn: TurnRequest, plan: Plan, trace: Trace, failure: LegFailed, failures: _Failures
    ) -> Plan | None:
        """Another D, or the same once more when it is the only one and may have been restarted meanwhile."""
        try:
            return await self._plan(turn, trace, Strategy.DECODE_ONLY, frozenset(failures.avoid))
        except (NoEngine, ControlPlaneAway):
            again = failures.decodes[plan.decode.name] == 1 and failure.cause is not Cause.TIMEOUT
            return plan.at_most(Strategy.DECODE_ONLY) if again else None

    async def _attempt(self, turn: TurnRequest, plan: Plan, trace: Trace) -> Answer:
        attempt = Attempt(self._new_id(), turn.request_id, turn.tenant, turn.client.session_id, turn.kept, plan)
        if not plan.strategy.uses_prefill:
            if plan.strategy is Strategy.DECODE_DIRECT:
                trace.reused, trace.reason = plan.lease_tokens, f"up to {plan.lease_tokens} tokens; {trace.reason}"
            return await self._decode(turn, attempt, None, trace)
        found = await self._prefill(turn, attempt, trace)
        if isinstance(found, Answer):
            return found
        attempt = _as_done(attempt, found, trace)
        return await self._decode(turn, attempt, found, trace)

    async def _prefill(self, turn: TurnRequest, attempt: Attempt, trace: Trace) -> Prefilled | Answer:
        assert attempt.plan.prefill is not None
        body = bodies.for_prefill(turn.client, self._signer.for_prefill(attempt))
        started = self._clock()
        try:
            answer = await self._engines.prefill(attempt.plan.prefill.url + turn.path, body, _headers(attempt))
        finally:
            trace.prefill_seconds += self._clock() - started
        return answer if isinstance(answer, Answer) else _offered(answer)

    async def _decode(self, turn: TurnRequest, attempt: Attempt, found: Prefilled | None, trace: Trace) -> Answer:
        body = bodies.for_decode(turn.client, self._signer.for_decode(attempt, found))
        url = attempt.plan.decode.url + turn.path
        started = self._clock()
        answer = await self._engines.decode(url, body, _headers(attempt), turn.client.streamed)
        trace.first_byte_seconds = self._clock() - started
        return answer


def _headers(attempt: Attempt) -> dict[str, str]:
    """vLLM builds its internal ids on X-Request-Id, so it names the attempt, which is unique, not the client's word."""
    return {"content-type": "application/json", "x-request-id": attempt.attempt_id}


def _offered(answer: Any) -> Prefilled:
    """Raises LegFailed."""
    try:
        found = prefilled(answer)
    except MalformedReference as error:
        raise LegFailed(Leg.PREFILL, Cause.MALFORMED, f"its reference is malformed: {error}") from error
    if found is None:
        raise LegFailed(Leg.PREFILL, Cause.NO_REFERENCE, "it exported nothing")
    return found


def _as_done(attempt: Attempt, found: Prefilled, trace: Trace) -> Attempt:
    """PREFILL_REUSE without reuse was PREFILL_FRESH."""
    trace.reused = found.reused_tokens
    plan = attempt.plan
    if plan.strategy is not Strategy.PREFILL_REUSE or found.reused_tokens:
        return attempt
    plan = plan.at_most(Strategy.PREFILL_FRESH, found.reason)
    trace.strategy, trace.reason = str(plan.strategy), found.reason or trace.reason
    return dataclasses.replace(attempt, plan=plan)


def _end(failure: LegFailed) -> Answer:
    """The engine's own last word, or the gateway's. Raises GatewayError."""
    if failure.answer is not None:
        return failure.answer
    raise _error(failure) from failure


def _error(failure: LegFailed) -> GatewayError:
    if failure.cause is Cause.TIMEOUT:
        return EngineTimedOut(f"the engines did not begin to answer in time; {failure}")
    if failure.cause is Cause.CONNECT:
        return NoEngine(f"no decode engine can be reached now, try again shortly; {failure}")
    return EngineFailed(f"the request failed on every engine tried; {failure}")
