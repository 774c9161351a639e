"""Signs and checks what the gateway tells a connector in ``kv_transfer_params``.

The directive travels as ``{"directive": base64, "mac": hex HMAC-SHA256}`` under the key ``kvtide``. The MAC covers the
serialised bytes, so both sides agree whatever their protobuf runtime is.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import DecodeError

from kvtide.lease.v1 import directive_pb2

PARAMS_KEY = "kvtide"
PROTOCOL_VERSION = 1


class DirectiveError(ValueError):
    """The directive is malformed, of another protocol version, or not signed with the shared key."""


def _mac(payload: bytes, key: bytes) -> str:
    return hmac.new(key, payload, hashlib.sha256).hexdigest()


def encode(directive: directive_pb2.TurnDirective, key: bytes = b"") -> dict[str, str]:
    """The value for ``kv_transfer_params["kvtide"]``; an empty key signs with the empty key."""
    payload = directive.SerializeToString()
    return {"directive": base64.b64encode(payload).decode(), "mac": _mac(payload, key)}


def decode(value: object, key: bytes = b"") -> directive_pb2.TurnDirective:
    """The directive in ``value``. Raises DirectiveError."""
    if not isinstance(value, Mapping):
        raise DirectiveError("not an object")
    payload = _payload(value)
    mac = value.get("mac")
    if not isinstance(mac, str) or not hmac.compare_digest(mac.encode(), _mac(payload, key).encode()):
        raise DirectiveError("not signed with the shared key")
    try:
        directive = directive_pb2.TurnDirective.FromString(payload)
    except DecodeError as error:
        raise DirectiveError("not a TurnDirective") from error
    if abs(directive.protocol_version - PROTOCOL_VERSION) > 1:
        raise DirectiveError(f"protocol version {directive.protocol_version}, this side speaks {PROTOCOL_VERSION}")
    return directive


def _payload(value: Mapping[Any, Any]) -> bytes:
    text = value.get("directive")
    if not isinstance(text, str):
        raise DirectiveError("no directive")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DirectiveError("not base64") from error
