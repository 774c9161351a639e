"""Settings of the gateway, each an option and an environment variable."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from kvtide.cli.settings import setting
from kvtide_gateway.strategy import Strategy

RETENTIONS = ("auto", "none")
_DURATIONS = (
    "plan_timeout",
    "reconnect_backoff",
    "connect_timeout",
    "prefill_timeout",
    "first_byte_timeout",
    "idle_timeout",
    "answer_timeout",
    "record_timeout",
)
_COUNTS = ("max_body_bytes", "max_attempts", "remembered_sessions", "remembered_engines", "max_pending_records")


@dataclass(frozen=True)
class GatewaySettings:
    """All of the gateway's settings."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on.")
    routing_address: str = setting("127.0.0.1:7100", "host:port of the routing service.")
    session_address: str = setting("127.0.0.1:7100", "host:port of the session service.")
    service_api_key: str = setting("", "Operator key with which the gateway calls the services.")
    shared_key_file: str = setting("", "File with the key that directives are signed with; empty: the empty key.")
    api_keys_file: str = setting("", "JSON file of API keys; empty: open, everybody is tenant 'default'.")
    retention: str = setting("auto", "Retention of requests that name none: auto or none.")
    force_strategy: str = setting("", f"Strategy for every request: {', '.join(Strategy)}; empty: routing decides.")
    max_body_bytes: int = setting(32 * 2**20, "Largest request body.")
    max_attempts: int = setting(5, "Rungs and engines that one request may try before it fails.")
    plan_timeout: timedelta = setting(timedelta(seconds=0.5), "Seconds that a plan may take.")
    await_window: timedelta = setting(
        timedelta(seconds=1), "Seconds after a turn for which the next plan waits for its lease to be reported."
    )
    reconnect_backoff: timedelta = setting(timedelta(seconds=1), "Most seconds between connection tries to a service.")
    connect_timeout: timedelta = setting(timedelta(seconds=2), "Seconds to connect to an engine.")
    prefill_timeout: timedelta = setting(timedelta(seconds=60), "Seconds that the prefill leg may take.")
    first_byte_timeout: timedelta = setting(timedelta(seconds=120), "Seconds until a stream from D must begin.")
    idle_timeout: timedelta = setting(timedelta(seconds=120), "Seconds of silence after which D's stream is given up.")
    answer_timeout: timedelta = setting(timedelta(hours=1), "Seconds that an answer from D may take, if not streamed.")
    engine_keepalive: timedelta = setting(
        timedelta(seconds=4), "Seconds that an idle connection to an engine is kept; below the engine's own (vLLM: 5)."
    )
    client_keepalive: timedelta = setting(timedelta(seconds=75), "Seconds that a client's idle connection is kept.")
    record_timeout: timedelta = setting(timedelta(seconds=2), "Seconds that the report of a turn may take.")
    max_pending_records: int = setting(1000, "Reports of turns under way at once; more are dropped and counted.")
    remembered_sessions: int = setting(100_000, "Sessions whose last turn this gateway remembers.")
    remembered_engines: int = setting(1000, "Decode engines that this gateway remembers for when routing is away.")
    retry_after: timedelta = setting(timedelta(seconds=5), "Seconds that a 503 asks clients to wait.")
    grace: timedelta = setting(timedelta(seconds=5), "Seconds that open requests have when the gateway stops.")

    def __post_init__(self) -> None:
        if self.retention not in RETENTIONS:
            raise ValueError("retention must be auto or none")
        if self.force_strategy and self.force_strategy not in set(Strategy):
            raise ValueError(f"force_strategy must be one of {', '.join(Strategy)}")
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in _DURATIONS:
            if getattr(self, name) <= timedelta(0):
                raise ValueError(f"{name} must be above 0")
        if self.idle_timeout < self.first_byte_timeout:
            raise ValueError("idle_timeout must not be below first_byte_timeout, which it would cut short")

    def shared_key(self) -> bytes:
        """The HMAC key. Raises OSError."""
        return Path(self.shared_key_file).read_bytes().strip() if self.shared_key_file else b""
