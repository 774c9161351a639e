"""API keys → tenants."""

from kvtide.keys import DEFAULT_TENANT, MAX_TENANT, TENANT_RANGE, Caller, Keys, is_tenant
from kvtide_services.errors import Forbidden, InvalidField, UnknownApiKey

TENANT_KEY = "x-kvtide-tenant"


class KeyRing(Keys):
    """The keys of callers; operators may name the tenant that they act for, without a file everybody may."""

    def caller(self, authorization: str, tenant: str) -> Caller:
        """By Authorization header and named tenant. Raises UnknownApiKey, Forbidden, InvalidField."""
        if tenant and not is_tenant(tenant):
            raise InvalidField(TENANT_KEY, tenant[:MAX_TENANT], TENANT_RANGE)
        if self.open:
            return Caller(tenant or DEFAULT_TENANT, operator=True)
        found = self.holder(authorization)
        if found is None:
            raise UnknownApiKey
        if not tenant or tenant == found.tenant:
            return found
        if not found.operator:
            raise Forbidden(tenant)
        return Caller(tenant, operator=True)
