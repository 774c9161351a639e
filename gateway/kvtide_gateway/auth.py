"""API keys → tenants."""

from kvtide.keys import DEFAULT_TENANT, Caller, Keys
from kvtide_gateway.errors import Unauthorized


class KeyRing(Keys):
    """The keys of clients; without a file everybody is an operator of the default tenant."""

    def caller(self, authorization: str) -> Caller:
        """The caller of an Authorization header. Raises Unauthorized."""
        if self.open:
            return Caller(DEFAULT_TENANT, operator=True)
        caller = self.holder(authorization)
        if caller is None:
            raise Unauthorized("a valid API key is needed: Authorization: Bearer <key>")
        return caller
