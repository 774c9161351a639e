"""Which key acts for whom."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvtide.keys import Caller
from kvtide_services.auth import KeyRing
from kvtide_services.errors import Forbidden, InvalidField, UnknownApiKey

KEYS = {
    "keys": [
        {"key": "ka", "tenant": "acme"},
        {"key": "kb", "tenant": "beta", "role": "client"},
        {"key": "kö", "tenant": "ops", "role": "operator"},
    ]
}


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(KEYS))
    return KeyRing.from_file(str(path))


@pytest.mark.parametrize(
    ("authorization", "tenant", "caller"),
    [
        ("Bearer ka", "", Caller("acme", operator=False)),
        ("bearer  ka ", "acme", Caller("acme", operator=False)),
        ("Bearer kö", "", Caller("ops", operator=True)),
        ("Bearer kö", "acme", Caller("acme", operator=True)),
    ],
)
def test_a_key_names_its_caller(ring: KeyRing, authorization: str, tenant: str, caller: Caller) -> None:
    assert ring.caller(authorization, tenant) == caller


@pytest.mark.parametrize("authorization", ["", "ka", "Basic ka", "Bearer ", "Bearer kx", "Bearer ka kb"])
def test_anything_else_is_unknown(ring: KeyRing, authorization: str) -> None:
    with pytest.raises(UnknownApiKey):
        ring.caller(authorization, "")


def test_a_client_acts_for_its_own_tenant_only(ring: KeyRing) -> None:
    with pytest.raises(Forbidden) as raised:
        ring.caller("Bearer ka", "beta")
    assert raised.value.metadata == {"tenant": "beta"}


def test_without_a_file_everybody_is_an_operator() -> None:
    ring = KeyRing.from_file("")
    assert ring.caller("", "") == Caller("default", operator=True)
    assert ring.caller("", "acme") == Caller("acme", operator=True)


@pytest.mark.parametrize("tenant", ["a}:leases:b", "{", "x" * 129, "tab\t", "ä"])
def test_a_tenant_that_could_be_taken_for_another_is_refused(tenant: str) -> None:
    with pytest.raises(InvalidField):
        KeyRing.from_file("").caller("", tenant)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("nonsense", "Expecting value"),
        ([], "not a key file"),
        ({"keys": 5}, "not a key file"),
        ({"keys": ["x"]}, "not a key file"),
        ({"keys": [{"key": "k"}]}, "not a key file"),
        ({"keys": [{"key": "", "tenant": "t"}]}, "not empty"),
        ({"keys": [{"key": "k", "tenant": "a}b"}]}, "braces"),
        ({"keys": [{"key": "k", "tenant": 5}]}, "braces"),
        ({"keys": [{"key": "k", "tenant": "t", "role": "root"}]}, "client, operator"),
    ],
)
def test_a_bad_file_is_refused_with_words(tmp_path: Path, content: Any, words: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=words):
        KeyRing.from_file(str(path))
