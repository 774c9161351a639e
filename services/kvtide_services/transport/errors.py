"""Domain errors → gRPC status with google.rpc.ErrorInfo. The one place that knows both."""

from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode

from kvtide.errors.v1 import errors_pb2
from kvtide_services import errors

DOMAIN = "kvtide"
TABLE: dict[type[errors.KvtideError], tuple[StatusCode, "errors_pb2.ErrorReason.ValueType"]] = {
    errors.InvalidField: (StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_FIELD),
    errors.InvalidToken: (StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_TOKEN),
    errors.UnknownApiKey: (StatusCode.UNAUTHENTICATED, errors_pb2.ERROR_REASON_UNKNOWN_API_KEY),
    errors.Forbidden: (StatusCode.PERMISSION_DENIED, errors_pb2.ERROR_REASON_FORBIDDEN),
    errors.SessionNotFound: (StatusCode.NOT_FOUND, errors_pb2.ERROR_REASON_SESSION_NOT_FOUND),
    errors.SessionExists: (StatusCode.ALREADY_EXISTS, errors_pb2.ERROR_REASON_SESSION_EXISTS),
    errors.LeaseNotFound: (StatusCode.NOT_FOUND, errors_pb2.ERROR_REASON_LEASE_NOT_FOUND),
    errors.IncompatibleEngine: (StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_INCOMPATIBLE_ENGINE),
    errors.NoDecodeEngine: (StatusCode.UNAVAILABLE, errors_pb2.ERROR_REASON_NO_DECODE_ENGINE),
    errors.StoreUnavailable: (StatusCode.UNAVAILABLE, errors_pb2.ERROR_REASON_STORE_UNAVAILABLE),
}


def status_of(error: errors.KvtideError) -> tuple[StatusCode, status_pb2.Status]:
    """The code and the full status of a domain error."""
    code, reason = TABLE[type(error)]
    name = errors_pb2.ErrorReason.Name(reason).removeprefix("ERROR_REASON_")
    info = error_details_pb2.ErrorInfo(reason=name, domain=DOMAIN, metadata=error.metadata)
    detail = any_pb2.Any()
    detail.Pack(info)
    return code, status_pb2.Status(code=code.value[0], message=str(error), details=[detail])
