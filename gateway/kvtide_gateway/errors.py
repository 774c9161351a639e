"""The gateway's own errors, and the one table that maps them to HTTP and OpenAI's error body."""

import json


class GatewayError(Exception):
    """A failure that a client is told about. ``param`` names the part of the request at fault.

    ``strategy`` and ``headers`` say how far a turn got, for metrics and for the response.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.strategy = "none"
        self.headers: list[tuple[bytes, bytes]] = []


class BadRequest(GatewayError):
    """The request cannot be understood."""


class Unauthorized(GatewayError):
    """No API key, or an unknown one."""


class NotAllowed(GatewayError):
    """Known, but not allowed."""


class NoSuchRoute(GatewayError):
    """The path is not served."""


class MethodNotAllowed(GatewayError):
    """The path is served, by other methods."""


class TooLarge(GatewayError):
    """The body is larger than the limit."""


class InternalError(GatewayError):
    """A fault of the gateway's own."""


class EngineFailed(GatewayError):
    """The engines broke off before an answer began."""


class NoEngine(GatewayError):
    """No decode engine can answer now."""


class ControlPlaneAway(GatewayError):
    """The routing service does not answer, and nothing is known without it."""


class EngineTimedOut(GatewayError):
    """An engine did not begin to answer in time."""


TABLE: dict[type[GatewayError], tuple[int, str, str]] = {
    BadRequest: (400, "invalid_request_error", "bad_request"),
    Unauthorized: (401, "invalid_request_error", "invalid_api_key"),
    NotAllowed: (403, "invalid_request_error", "not_allowed"),
    NoSuchRoute: (404, "invalid_request_error", "not_found"),
    MethodNotAllowed: (405, "invalid_request_error", "method_not_allowed"),
    TooLarge: (413, "invalid_request_error", "request_too_large"),
    InternalError: (500, "server_error", "internal_error"),
    EngineFailed: (502, "server_error", "engine_failed"),
    NoEngine: (503, "server_error", "no_engine"),
    ControlPlaneAway: (503, "server_error", "control_plane_away"),
    EngineTimedOut: (504, "server_error", "engine_timed_out"),
}


def render(error: GatewayError) -> tuple[int, bytes]:
    """HTTP status and OpenAI's error body."""
    status, kind, code = TABLE[type(error)]
    body = {"error": {"message": str(error), "type": kind, "param": error.param, "code": code}}
    return status, json.dumps(body).encode()
