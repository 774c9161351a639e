"""The API key file that the services and the gateway share: {"keys": [{"key": …, "tenant": …, "role": …}]}.

``role`` is "client" (the default) or "operator". Each side adds what it does with a caller, and its own errors.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

DEFAULT_TENANT = "default"
MAX_TENANT = 128
TENANT_RANGE = f"1 to {MAX_TENANT} printable ASCII characters without braces"
_ROLES = ("client", "operator")


@dataclass(frozen=True)
class Caller:
    """Who calls, and for which tenant."""

    tenant: str
    operator: bool


class Keys:
    """The callers of a key file, or none at all: then everybody is an operator."""

    def __init__(self, callers: Mapping[str, Caller] | None) -> None:
        """None: no authentication."""
        # Looked up by digest: the time that a look-up takes says nothing about the keys.
        self._callers = None if callers is None else {_digest(key): caller for key, caller in callers.items()}

    @classmethod
    def from_file(cls, path: str) -> Self:
        """An empty path means no authentication. Raises OSError, ValueError."""
        if not path:
            return cls(None)
        try:
            return cls(dict(_row(row) for row in json.loads(Path(path).read_text())["keys"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a key file: {error!r}") from error

    @property
    def open(self) -> bool:
        """Whether there is no authentication."""
        return self._callers is None

    def holder(self, authorization: str) -> Caller | None:
        """Who holds the key of an Authorization header; None for an unknown one."""
        scheme, _, key = authorization.partition(" ")
        if self._callers is None or scheme.lower() != "bearer":
            return None
        return self._callers.get(_digest(key.strip()))


def is_tenant(name: object) -> bool:
    """Braces would end the hash tag in the store's keys, and let one tenant's keys look like another's."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_TENANT:
        return False
    return name.isascii() and name.isprintable() and not set(name) & set("{}")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _row(row: Mapping[str, Any]) -> tuple[str, Caller]:
    key, tenant, role = row["key"], row["tenant"], row.get("role", "client")
    if not isinstance(key, str) or not key:
        raise ValueError("a key must be text, and not empty")
    if not is_tenant(tenant):
        raise ValueError(f"a tenant must be {TENANT_RANGE}, not {tenant!r}")
    if role not in _ROLES:
        raise ValueError(f"a role is one of {', '.join(_ROLES)}, not {role!r}")
    return key, Caller(tenant, role == "operator")
