"""Who may call what; health and reflection, which everybody may."""

from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvtide.lease.v1 import lease_pb2
from kvtide.session.v1 import session_pb2

NAMES = ["kvtide.lease.v1.LeaseService", "kvtide.routing.v1.RoutingService", "kvtide.session.v1.SessionService"]


def create(client: Any) -> Any:
    return client.call(client.sessions.CreateSession, session_pb2.CreateSessionRequest(session_id="s1"))


def get(client: Any) -> Any:
    return client.call(client.sessions.GetSession, session_pb2.GetSessionRequest(session_id="s1"))


@pytest.mark.parametrize("key", ["", "nonsense"])
async def test_without_a_known_key_nothing_is_answered(guarded: Any, failure: Any, key: str) -> None:
    client = guarded.client("", key)
    for call in (
        create(client),
        client.plan(),
        client.engines(),
        client.sessions.KeepAlive(metadata=client.metadata).read(),
    ):
        assert await failure(call) == ("UNAUTHENTICATED", "UNKNOWN_API_KEY", {})


async def test_a_tenant_finds_nothing_of_another(guarded: Any, failure: Any, lease: Any, eventually: Any) -> None:
    acme, beta = guarded.client("", "ka"), guarded.client("", "kb")
    await create(acme)
    await guarded.attach("decode-0", lease(), key="ko")
    assert (await failure(get(beta)))[1] == "SESSION_NOT_FOUND"
    found = await beta.call(beta.leases.ListLeases, lease_pb2.ListLeasesRequest())
    assert list(found.leases) == []
    assert (await failure(beta.call(beta.leases.GetLease, lease_pb2.GetLeaseRequest(lease_id="l1"))))[1] == (
        "LEASE_NOT_FOUND"
    )
    released = await beta.call(beta.leases.ReleaseLeases, lease_pb2.ReleaseLeasesRequest(session_id="s1"))
    assert released.released == 0

    async def reported() -> bool:
        return bool((await acme.plan()).reason.endswith("holds 640 tokens of this session (turn 1)"))

    assert await eventually(reported)
    assert (await beta.plan()).reason.endswith("nothing of this session is held")


async def test_a_client_cannot_act_for_another_tenant_but_an_operator_can(guarded: Any, failure: Any) -> None:
    await create(guarded.client("", "ka"))
    assert await failure(get(guarded.client("acme", "kb"))) == ("PERMISSION_DENIED", "FORBIDDEN", {"tenant": "acme"})
    assert (await get(guarded.client("acme", "ko"))).session.tenant == "acme"


async def test_engines_are_the_operators_business(guarded: Any, failure: Any) -> None:
    client = guarded.client("", "ka")
    assert (await failure(client.engines()))[:2] == ("PERMISSION_DENIED", "FORBIDDEN")
    call = client.leases.Attach(metadata=client.metadata)
    assert (await failure(call.read()))[:2] == ("PERMISSION_DENIED", "FORBIDDEN")
    await guarded.attach(key="ko")
    assert await guarded.client("", "ko").engines() == ["decode-0"]


async def test_a_tenant_name_that_could_be_taken_for_another_is_refused(services: Any, failure: Any) -> None:
    code, reason, metadata = await failure(create(services.client("a}:leases:b")))
    assert (code, reason, metadata["field"]) == ("INVALID_ARGUMENT", "INVALID_FIELD", "x-kvtide-tenant")


async def test_health_says_serving_for_each_service_and_the_whole(guarded: Any) -> None:
    stub: Any = health_pb2_grpc.HealthStub(guarded.client("").channel)
    for name in ["", *NAMES]:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Check(health_pb2.HealthCheckRequest(service="unknown"))


async def test_reflection_names_the_services_and_describes_them(guarded: Any) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(guarded.client("").channel)
    call = stub.ServerReflectionInfo(timeout=10)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = {service.name for service in (await call.read()).list_services_response.service}
    assert set(NAMES) < listed
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAMES[0]))
    files = (await call.read()).file_descriptor_response.file_descriptor_proto
    methods = FileDescriptorProto.FromString(files[0]).service[0].method
    assert "Attach" in [method.name for method in methods]
    await call.done_writing()
