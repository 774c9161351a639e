"""gRPC in, rules out."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide.lease.v1 import lease_pb2_grpc
from kvtide_services.lease.relay import Outbox, end
from kvtide_services.lease.service import Registry
from kvtide_services.transport.calls import caller_of, operator_of, page, require


class LeaseServicer(lease_pb2_grpc.LeaseServiceServicer):
    """kvtide.lease.v1.LeaseService."""

    def __init__(self, registry: Registry, backlog: int) -> None:
        """``backlog``: messages that may wait for one link."""
        self._registry = registry
        self._backlog = backlog

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.AttachResponse]:
        operator_of(context)
        first = await anext(aiter(request_iterator), pb.AttachRequest())
        require(first.HasField("hello"), "message", first.WhichOneof("message"), "hello first")
        outbox: Outbox = asyncio.Queue(self._backlog)
        welcome = self._registry.attach(first.hello, outbox)
        async with self._link(first.hello.engine, request_iterator, outbox):
            yield pb.AttachResponse(welcome=welcome)
            while (message := await outbox.get()) is not None:
                yield message

    @contextlib.asynccontextmanager
    async def _link(self, engine: pb.Engine, requests: Any, outbox: Outbox) -> AsyncIterator[None]:
        reading = asyncio.create_task(self._read(engine, requests, outbox))
        try:
            yield
        finally:
            self._registry.detach(engine, outbox)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, engine: pb.Engine, requests: Any, outbox: Outbox) -> None:
        try:
            async for message in requests:
                self._registry.receive(engine, message, outbox)
        finally:
            end(outbox)

    async def GetLease(self, request: pb.GetLeaseRequest, context: Any) -> pb.GetLeaseResponse:
        require(request.lease_id != "", "lease_id", "", "set")
        return pb.GetLeaseResponse(lease=self._registry.lease(caller_of(context).tenant, request.lease_id))

    async def ListLeases(self, request: pb.ListLeasesRequest, context: Any) -> pb.ListLeasesResponse:
        leases = self._registry.leases(caller_of(context).tenant, request.session_id)
        rows, token = page(leases, lambda lease: lease.lease_id, request.page_size, request.page_token)
        return pb.ListLeasesResponse(leases=rows, next_page_token=token)

    async def ReleaseLeases(self, request: pb.ReleaseLeasesRequest, context: Any) -> pb.ReleaseLeasesResponse:
        require(request.session_id != "", "session_id", "", "set")
        tenant = caller_of(context).tenant
        released = await self._registry.release(tenant, request.session_id, request.lease_id)
        return pb.ReleaseLeasesResponse(released=released)

    async def ListEngines(self, request: pb.ListEnginesRequest, context: Any) -> pb.ListEnginesResponse:
        operator_of(context)
        rows, token = page(self._registry.engines(), lambda s: s.engine.name, request.page_size, request.page_token)
        return pb.ListEnginesResponse(engines=rows, next_page_token=token)
