"""gRPC in, rules out."""

from typing import Any

from kvtide.lease.v1 import directive_pb2, lease_pb2
from kvtide.routing.v1 import routing_pb2 as pb
from kvtide.routing.v1 import routing_pb2_grpc
from kvtide_services.routing.choice import Plan
from kvtide_services.routing.router import Planner, Wanted
from kvtide_services.session.keeper import MAX_ID
from kvtide_services.transport.calls import caller_of, require


class RoutingServicer(routing_pb2_grpc.RoutingServiceServicer):
    """kvtide.routing.v1.RoutingService."""

    def __init__(self, router: Planner) -> None:
        self._router = router

    async def Plan(self, request: pb.PlanRequest, context: Any) -> pb.PlanResponse:
        return message(await self._router.plan(_wanted(request, caller_of(context).tenant)))

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=await self._router.models())


def _wanted(request: pb.PlanRequest, tenant: str) -> Wanted:
    name = request.session_id[:MAX_ID]
    require(request.model != "", "model", "", "set")
    require(request.session_id == name, "session_id", name, f"at most {MAX_ID} characters")
    require(request.await_turn >= 0, "await_turn", request.await_turn, "0 or more")
    require(request.force in directive_pb2.Strategy.values(), "force", request.force, "a known strategy")
    return Wanted(
        tenant=tenant,
        model=request.model,
        session_id=name,
        await_turn=request.await_turn,
        force=request.force,
        avoid=frozenset(request.avoid_engines),
    )


def message(plan: Plan) -> pb.PlanResponse:
    """A plan as gateways see it."""
    response = pb.PlanResponse(strategy=plan.strategy, reason=plan.reason, decode=_engine(plan.decode), turn=plan.turn)
    if plan.prefill is not None:
        response.prefill.CopyFrom(_engine(plan.prefill))
    if plan.lease is not None:
        lease = plan.lease
        response.lease_tokens = lease.num_tokens
        response.lease.CopyFrom(
            directive_pb2.LeaseRef(
                lease_id=lease.lease_id, epoch=lease.epoch, engine=lease.engine, boot_id=lease.boot_id
            )
        )
    return response


def _engine(status: lease_pb2.EngineStatus) -> pb.PlannedEngine:
    return pb.PlannedEngine(engine=status.engine, clock_stamp=status.beat.clock_stamp)
