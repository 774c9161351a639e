"""Every domain error has a gRPC status with a documented reason."""

from google.rpc import error_details_pb2
from grpc import StatusCode

from kvtide_services import errors
from kvtide_services.transport.errors import TABLE, status_of


def test_every_domain_error_is_in_the_table() -> None:
    every = {e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.KvtideError)}
    assert every - {errors.KvtideError} == set(TABLE)


def test_a_status_carries_reason_domain_and_metadata() -> None:
    code, status = status_of(errors.InvalidField("ttl", -1, "above 0"))
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (code, info.reason, info.domain) == (StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "kvtide")
    assert dict(info.metadata) == {"field": "ttl", "value": "-1", "range": "above 0"}
