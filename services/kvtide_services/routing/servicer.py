"""gRPC in, rules out."""

from typing import Any

from kvtide.lease.v1 import directive_pb2, lease_pb2
from kvtide.routing.v1 import routing_pb2 as pb
from kvtide.routing.v1 import routing_pb2_grpc
from kvtide_services.routing.router import Plan, Router, Wanted
from kvtide_services.transport.calls import caller_of, require


class RoutingServicer(routing_pb2_grpc.RoutingServiceServicer):
    """kvtide.routing.v1.RoutingService."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def Plan(self, request: pb.PlanRequest, context: Any) -> pb.PlanResponse:
        require(request.model != "", "model", "", "set")
        require(request.await_turn >= 0, "await_turn", request.await_turn, "0 or more")
        wanted = Wanted(
            tenant=caller_of(context).tenant,
            model=request.model,
            session_id=request.session_id,
            await_turn=request.await_turn,
            force=request.force,
            avoid=frozenset(request.avoid_engines),
        )
        return message(await self._router.plan(wanted))

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=await self._router.models())


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
