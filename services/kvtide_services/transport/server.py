"""The gRPC server: authentication, errors, health, reflection."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvtide_services.auth import TENANT_KEY, KeyRing
from kvtide_services.errors import KvtideError
from kvtide_services.transport.calls import CALLER
from kvtide_services.transport.errors import status_of

_OPEN = ("/grpc.health.", "/grpc.reflection.")
_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.http2.min_ping_interval_without_data_ms", 4000),
    ("grpc.keepalive_permit_without_calls", 1),
]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Checks the key of each call and turns domain errors into statuses."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:
        """Wraps the handler of a call, whatever its arity."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(_OPEN):
            return handler
        if handler.response_streaming:
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else (grpc.unary_stream_rpc_method_handler)
            )
            inner = handler.stream_stream or handler.unary_stream
            return make(self._stream(inner), handler.request_deserializer, handler.response_serializer)
        unary = self._unary(handler.unary_unary)
        return grpc.unary_unary_rpc_method_handler(unary, handler.request_deserializer, handler.response_serializer)

    def _admit(self, context: Any) -> None:
        metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        CALLER.set(self._keys.caller(metadata.get("authorization", ""), metadata.get(TENANT_KEY, "")))

    def _unary(self, inner: Any) -> Any:
        async def call(request: Any, context: Any) -> Any:
            try:
                self._admit(context)
                return await inner(request, context)
            except KvtideError as error:
                await _abort(context, error)

        return call

    def _stream(self, inner: Any) -> Any:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                self._admit(context)
                async for response in inner(request, context):
                    yield response
            except KvtideError as error:
                await _abort(context, error)

        return call


async def _abort(context: Any, error: KvtideError) -> None:
    code, status = status_of(error)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    await context.abort(code, status.message)


class Server:
    """One listening gRPC server."""

    def __init__(self, keys: KeyRing, host: str, port: int) -> None:
        """Binds at once. Raises RuntimeError when the port is taken."""
        self._server = grpc.aio.server(interceptors=[CallInterceptor(keys)], options=_OPTIONS)
        self.port: int = self._server.add_insecure_port(f"{host}:{port}")
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names: list[str] = []

    def add(self, register: Callable[[Any, Any], None], servicer: Any, name: str) -> None:
        """Adds a service under its full name."""
        register(servicer, self._server)
        self._names.append(name)

    async def start(self) -> None:
        """Serves; health says so, for each service and for the whole."""
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        await self._server.start()
        await self._set(["", *self._names], health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace: float) -> None:
        """Stops taking calls and gives open ones ``grace`` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)

    async def _set(self, names: Sequence[str], status: Any) -> None:
        for name in names:
            await self._health.set(name, status)
