"""The connector with a gate between "ticket granted" and "read posted". P loads it, in the engine's environment."""

import time
from pathlib import Path
from typing import Any

from kvtide_connector import connector

LONGEST = 60.0
"""Seconds after which the gate opens by itself."""


class KvtideConnector(connector.KvtideConnector):
    """While ``e2e_gate_dir`` holds a file ``closed``, a step with reads makes a file ``reached`` and waits."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Posts the step's reads, once the gate is open."""
        directory = Path(self.kv_transfer_config.kv_connector_extra_config["e2e_gate_dir"])
        if self._connector_metadata.reqs_to_recv and (directory / "closed").exists():
            (directory / "reached").touch()
            deadline = time.monotonic() + LONGEST
            while (directory / "closed").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        super().start_load_kv(forward_context, **kwargs)
