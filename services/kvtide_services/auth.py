"""API keys → tenants."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtide_services.errors import Forbidden, InvalidField, UnknownApiKey

DEFAULT_TENANT = "default"
TENANT_KEY = "x-kvtide-tenant"
MAX_TENANT = 128
_ROLES = ("client", "operator")


@dataclass(frozen=True)
class Caller:
    """Who calls, and for whom."""

    tenant: str
    operator: bool


class KeyRing:
    """The keys of a file: {"keys": [{"key": …, "tenant": …, "role": "client" | "operator"}]}."""

    def __init__(self, callers: Mapping[str, Caller] | None) -> None:
        """None: everybody is an operator, and names the tenant."""
        # Looked up by digest: the time that a look-up takes says nothing about the keys.
        self._callers = None if callers is None else {_digest(key): caller for key, caller in callers.items()}

    @classmethod
    def from_file(cls, path: str) -> "KeyRing":
        """An empty path means no authentication. Raises OSError, ValueError."""
        if not path:
            return cls(None)
        try:
            return cls(dict(_row(row) for row in json.loads(Path(path).read_text())["keys"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a key file: {error!r}") from error

    def caller(self, authorization: str, tenant: str) -> Caller:
        """By Authorization header and named tenant. Raises UnknownApiKey, Forbidden, InvalidField."""
        if tenant and not is_tenant(tenant):
            raise InvalidField(TENANT_KEY, tenant[:MAX_TENANT], _TENANT_RANGE)
        if self._callers is None:
            return Caller(tenant or DEFAULT_TENANT, operator=True)
        scheme, _, key = authorization.partition(" ")
        found = self._callers.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        if found is None:
            raise UnknownApiKey
        if not tenant or tenant == found.tenant:
            return found
        if not found.operator:
            raise Forbidden(tenant)
        return Caller(tenant, operator=True)


_TENANT_RANGE = f"1 to {MAX_TENANT} printable ASCII characters without braces"


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
        raise ValueError(f"a tenant must be {_TENANT_RANGE}, not {tenant!r}")
    if role not in _ROLES:
        raise ValueError(f"a role is one of {', '.join(_ROLES)}, not {role!r}")
    return key, Caller(tenant, role == "operator")
