"""Settings of the services, each an option and an environment variable."""

from dataclasses import dataclass
from datetime import timedelta

from kvtide.cli.settings import setting
from kvtide.lease.v1 import directive_pb2

STRATEGIES = ("DECODE_DIRECT", "PREFILL_REUSE", "PREFILL_FRESH", "DECODE_ONLY")


@dataclass(frozen=True)
class ServeSettings:
    """Settings that all three services share; each uses those that concern it."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(7100, "Port to listen on; 0 takes a free one.")
    store_url: str = setting("redis://127.0.0.1:6379/0", "Redis or Valkey URL.")
    store_timeout: timedelta = setting(timedelta(seconds=0.25), "Seconds that one store operation may take.")
    api_keys_file: str = setting("", "JSON file of API keys; empty: no authentication, tenant from x-kvtide-tenant.")
    lease_address: str = setting("", "host:port of the lease service, for a session service that runs alone.")
    service_api_key: str = setting("", "Operator key with which the session service calls the lease service.")
    session_ttl: timedelta = setting(timedelta(seconds=120), "TTL of a session that asks for none, in seconds.")
    session_ttl_min: timedelta = setting(timedelta(seconds=10), "Shortest session TTL, in seconds.")
    session_ttl_max: timedelta = setting(timedelta(hours=1), "Longest session TTL, in seconds.")
    idle_ttl: timedelta = setting(
        timedelta(seconds=60), "TTL after a turn of a session that nobody renews, in seconds."
    )
    sweep_interval: timedelta = setting(timedelta(seconds=0.5), "Seconds between searches for lapsed sessions.")
    watch_checkpoint: timedelta = setting(timedelta(seconds=5), "Seconds of silence before a watch sends a checkpoint.")
    watch_history: int = setting(10000, "Session events kept per tenant for watches that resume.")
    beat_interval: timedelta = setting(timedelta(seconds=1), "Seconds between an engine's beats; gone after three.")
    relay_timeout: timedelta = setting(timedelta(seconds=0.5), "Seconds that a holder has to answer for a ticket.")
    link_backlog: int = setting(10000, "Messages that may wait for one engine's link before it is closed.")
    plan_await: timedelta = setting(timedelta(seconds=0.05), "Seconds that a plan waits for the last turn's lease.")
    engines_max_age: timedelta = setting(timedelta(seconds=0.2), "Seconds for which routing reuses its engine list.")
    engines_keep: timedelta = setting(timedelta(minutes=10), "Seconds for which routing uses it without the store.")
    force_strategy: str = setting("", f"Strategy for every request: {', '.join(STRATEGIES)}; empty: chosen each time.")
    recompute_threshold: int = setting(64, "Tokens below which a lease is not worth reading.")
    grace: timedelta = setting(timedelta(seconds=2), "Seconds that open calls have when the service stops.")

    def __post_init__(self) -> None:
        if not self.session_ttl_min <= self.session_ttl <= self.session_ttl_max:
            raise ValueError("session_ttl must lie between session_ttl_min and session_ttl_max")
        if self.idle_ttl > self.session_ttl_max:
            raise ValueError("idle_ttl must not exceed session_ttl_max")
        if self.force_strategy and self.force_strategy not in STRATEGIES:
            raise ValueError(f"force_strategy must be one of {', '.join(STRATEGIES)}")
        for name in (
            "store_timeout",
            "beat_interval",
            "relay_timeout",
            "sweep_interval",
            "session_ttl_min",
            "idle_ttl",
        ):
            if getattr(self, name) <= timedelta(0):
                raise ValueError(f"{name} must be above 0")

    @property
    def forced(self) -> "directive_pb2.Strategy.ValueType":
        """The forced strategy, or unspecified."""
        name = f"STRATEGY_{self.force_strategy or 'UNSPECIFIED'}"
        return directive_pb2.Strategy.Value(name)
