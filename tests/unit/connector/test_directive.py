"""Directives: what a gateway signs a connector reads; anything else is refused."""

import base64
from typing import Any

import pytest

from kvtide import directive as directives
from kvtide.lease.v1 import directive_pb2


def signed(version: int = 1, key: bytes = b"key") -> dict[str, str]:
    message = directive_pb2.TurnDirective(protocol_version=version, tenant="acme", session_id="s1", turn=7, retain=True)
    return directives.encode(message, key)


def test_what_was_signed_comes_back() -> None:
    message = directives.decode(signed(), b"key")
    assert (message.tenant, message.session_id, message.turn, message.retain) == ("acme", "s1", 7, True)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        {},
        {"directive": 5, "mac": ""},
        {"directive": "%%%", "mac": ""},
        {"directive": signed()["directive"]},
        {"directive": signed()["directive"], "mac": None},
        {"directive": signed()["directive"], "mac": "00"},
        {"directive": signed()["directive"], "mac": "ü"},
        signed(key=b"another"),
        {**signed(), "directive": base64.b64encode(b"\x22\x04evil").decode()},
    ],
)
def test_what_was_not_signed_with_the_key_is_refused(value: Any) -> None:
    with pytest.raises(directives.DirectiveError):
        directives.decode(value, b"key")


def test_signed_bytes_that_are_no_directive_are_refused() -> None:
    payload = b"\xff\xff\xff"
    value = {"directive": base64.b64encode(payload).decode(), "mac": directives._mac(payload, b"key")}
    with pytest.raises(directives.DirectiveError, match="not a TurnDirective"):
        directives.decode(value, b"key")


@pytest.mark.parametrize(("version", "works"), [(0, True), (1, True), (2, True), (3, False), (-1, False)])
def test_one_version_of_skew_works(version: int, works: bool) -> None:
    if works:
        assert directives.decode(signed(version), b"key").protocol_version == version
    else:
        with pytest.raises(directives.DirectiveError, match="version"):
            directives.decode(signed(version), b"key")
