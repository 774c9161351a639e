"""Ends the block leases of a session through a lease service in another process."""

import logging
from datetime import timedelta
from typing import Any

import grpc

from kvtide.lease.v1 import lease_pb2, lease_pb2_grpc
from kvtide_services.auth import TENANT_KEY

logger = logging.getLogger(__name__)


async def release_nothing(tenant: str, session_id: str) -> int:
    """For a session service that knows no lease service: blocks end at their own deadline."""
    return 0


class RemoteReleaser:
    """A LeaseReleaser. While the lease service is away blocks end at their own deadline."""

    def __init__(self, address: str, api_key: str, timeout: timedelta) -> None:
        """``address``: host:port; ``api_key``: an operator's, or empty."""
        self._channel = grpc.aio.insecure_channel(address)
        self._stub: Any = lease_pb2_grpc.LeaseServiceStub(self._channel)
        self._api_key = api_key
        self._timeout = timeout.total_seconds()

    async def __call__(self, tenant: str, session_id: str) -> int:
        """How many holders were told."""
        key = [("authorization", f"Bearer {self._api_key}")] if self._api_key else []
        request = lease_pb2.ReleaseLeasesRequest(session_id=session_id)
        try:
            response = await self._stub.ReleaseLeases(
                request, metadata=[(TENANT_KEY, tenant), *key], timeout=self._timeout
            )
        except grpc.aio.AioRpcError as error:
            logger.warning("The lease service did not release the blocks of a session: %s", error.code())
            return 0
        return int(response.released)

    async def aclose(self) -> None:
        """Closes the channel."""
        await self._channel.close()
