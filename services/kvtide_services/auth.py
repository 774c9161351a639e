"""API keys → tenants."""

import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtide_services.errors import Forbidden, UnknownApiKey

DEFAULT_TENANT = "default"
TENANT_KEY = "x-kvtide-tenant"


@dataclass(frozen=True)
class Caller:
    """Who calls, and for whom."""

    tenant: str
    operator: bool


class KeyRing:
    """The keys of a file: {"keys": [{"key": …, "tenant": …, "role": "client" | "operator"}]}."""

    def __init__(self, callers: Mapping[str, Caller] | None) -> None:
        """None: everybody is an operator, and names the tenant."""
        self._callers = callers

    @classmethod
    def from_file(cls, path: str) -> "KeyRing":
        """An empty path means no authentication. Raises OSError, ValueError."""
        if not path:
            return cls(None)
        try:
            rows = json.loads(Path(path).read_text())["keys"]
            return cls({row["key"]: Caller(row["tenant"], _is_operator(row.get("role", "client"))) for row in rows})
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a key file: {error!r}") from error

    def caller(self, authorization: str, tenant: str) -> Caller:
        """Who holds the key of an Authorization header. Raises UnknownApiKey, Forbidden."""
        if self._callers is None:
            return Caller(tenant or DEFAULT_TENANT, operator=True)
        key = authorization.removeprefix("Bearer ").strip()
        found = next((c for k, c in self._callers.items() if hmac.compare_digest(k.encode(), key.encode())), None)
        if found is None:
            raise UnknownApiKey
        if not tenant or tenant == found.tenant:
            return found
        if not found.operator:
            raise Forbidden(tenant)
        return Caller(tenant, operator=True)


def _is_operator(role: str) -> bool:
    if role not in ("client", "operator"):
        raise ValueError(f"role must be client or operator, not {role!r}")
    return role == "operator"
