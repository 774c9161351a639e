"""API keys → tenants."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtide_gateway.errors import Unauthorized

DEFAULT_TENANT = "default"
_ROLES = ("client", "operator")


@dataclass(frozen=True)
class Caller:
    """Who asks."""

    tenant: str
    operator: bool


class KeyRing:
    """The keys of a file: {"keys": [{"key": …, "tenant": …, "role": "client" | "operator"}]}."""

    def __init__(self, callers: Mapping[str, Caller] | None) -> None:
        """None: open, everybody is an operator of the tenant "default"."""
        # Looked up by digest: the time that a look-up takes says nothing about the keys.
        self._callers = None if callers is None else {_digest(key): caller for key, caller in callers.items()}

    @classmethod
    def from_file(cls, path: str) -> "KeyRing":
        """An empty path is open. Raises OSError, ValueError."""
        if not path:
            return cls(None)
        try:
            return cls(dict(_row(row) for row in json.loads(Path(path).read_text())["keys"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a key file: {error!r}") from error

    def caller(self, authorization: str) -> Caller:
        """The caller of an Authorization header. Raises Unauthorized."""
        if self._callers is None:
            return Caller(DEFAULT_TENANT, operator=True)
        scheme, _, key = authorization.partition(" ")
        caller = self._callers.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        if caller is None:
            raise Unauthorized("a valid API key is needed: Authorization: Bearer <key>")
        return caller


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _row(row: Mapping[str, Any]) -> tuple[str, Caller]:
    key, tenant, role = row["key"], row["tenant"], row.get("role", "client")
    if not isinstance(key, str) or not key:
        raise ValueError("a key must be text, and not empty")
    if not isinstance(tenant, str) or not tenant or not tenant.isascii() or not tenant.isprintable():
        raise ValueError(f"a tenant must be printable ASCII text, not {tenant!r}")
    if role not in _ROLES:
        raise ValueError(f"a role is one of {', '.join(_ROLES)}, not {role!r}")
    return key, Caller(tenant, role == "operator")
