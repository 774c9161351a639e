"""Settings of the services, each an option and an environment variable."""

from dataclasses import dataclass
from datetime import timedelta

from kvtide.cli.settings import setting
from kvtide.lease.v1 import directive_pb2

STRATEGIES = ("DECODE_DIRECT", "PREFILL_REUSE", "PREFILL_FRESH", "DECODE_ONLY")
_POSITIVE = (
    "store_timeout",
    "session_ttl_min",
    "idle_ttl",
    "sweep_interval",
    "watch_checkpoint",
    "beat_interval",
    "relay_timeout",
    "plan_poll",
)
_COUNTS = ("store_connections", "watch_limit", "watch_history", "link_backlog")


@dataclass(frozen=True)
class ServeSettings:
    """Settings that all three services share; each uses those that concern it."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(7100, "Port to listen on; 0 takes a free one.")
    metrics_port: int = setting(0, "Port for Prometheus on the same address; 0: none.")
    store_url: str = setting("redis://127.0.0.1:6379/0", "Redis or Valkey URL.")
    store_timeout: timedelta = setting(timedelta(seconds=0.25), "Seconds that one store operation may take.")
    store_connections: int = setting(64, "Connections to the store; more operations at once wait for one.")
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
    watch_limit: int = setting(1000, "Watches that may wait at once; each has its own connection to the store.")
    beat_interval: timedelta = setting(timedelta(seconds=1), "Seconds between an engine's beats; gone after three.")
    relay_timeout: timedelta = setting(timedelta(seconds=0.5), "Seconds that a holder has to answer for a ticket.")
    link_backlog: int = setting(10000, "Messages that may wait for one engine's link before it is closed.")
    plan_await: timedelta = setting(timedelta(seconds=0.05), "Seconds that a plan waits for the last turn's lease.")
    plan_poll: timedelta = setting(timedelta(seconds=0.003), "Seconds between its looks at the store.")
    engines_max_age: timedelta = setting(
        timedelta(seconds=0.5), "Seconds for which routing reuses its engine list; it is read anew at half of it."
    )
    engines_keep: timedelta = setting(timedelta(minutes=10), "Seconds for which routing uses it without the store.")
    force_strategy: str = setting("", f"Strategy for every request: {', '.join(STRATEGIES)}; empty: chosen each time.")
    recompute_threshold: int = setting(64, "Tokens below which a lease is not worth reading.")
    grace: timedelta = setting(timedelta(seconds=2), "Seconds that open calls have when the service stops.")

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            _check(getattr(self, name) > timedelta(0), f"{name} must be above 0")
        for name in _COUNTS:
            _check(getattr(self, name) > 0, f"{name} must be above 0")
        for name in ("port", "metrics_port"):
            _check(0 <= getattr(self, name) <= 65535, f"{name} must lie between 0 and 65535")
        self._check_relations()

    def _check_relations(self) -> None:
        ordered = self.session_ttl_min <= self.session_ttl <= self.session_ttl_max
        _check(ordered, "session_ttl must lie between session_ttl_min and session_ttl_max")
        _check(self.idle_ttl <= self.session_ttl_max, "idle_ttl must not exceed session_ttl_max")
        _check(
            self.sweep_interval < timedelta(seconds=1), "sweep_interval must be below 1, to notice lapses within 1 s"
        )
        gone = "the time after which an engine counts as gone, three times beat_interval"
        _check(self.store_timeout < 3 * self.beat_interval, f"store_timeout must be below {gone}")
        _check(timedelta(0) <= self.engines_max_age < 3 * self.beat_interval, f"engines_max_age must be below {gone}")
        _check(self.engines_max_age <= self.engines_keep, "engines_keep must not be below engines_max_age")
        _check(min(self.plan_await, self.grace) >= timedelta(0), "plan_await and grace must not be negative")
        _check(self.recompute_threshold >= 0, "recompute_threshold must not be negative")
        known = ("", *STRATEGIES)
        _check(self.force_strategy in known, f"force_strategy must be one of {', '.join(STRATEGIES)}")

    @property
    def gone_after(self) -> timedelta:
        """Silence after which an engine counts as gone: three beats."""
        return 3 * self.beat_interval

    @property
    def forced(self) -> "directive_pb2.Strategy.ValueType":
        """The forced strategy, or unspecified."""
        name = f"STRATEGY_{self.force_strategy or 'UNSPECIFIED'}"
        return directive_pb2.Strategy.Value(name)


@dataclass(frozen=True)
class SessionSettings(ServeSettings):
    """The session service alone."""

    port: int = setting(7101, "Port to listen on; 0 takes a free one.")
    lease_address: str = setting("127.0.0.1:7102", "host:port of the lease service; empty: blocks end by themselves.")


@dataclass(frozen=True)
class LeaseSettings(ServeSettings):
    """The lease service alone."""

    port: int = setting(7102, "Port to listen on; 0 takes a free one.")


@dataclass(frozen=True)
class RoutingSettings(ServeSettings):
    """The routing service alone."""

    port: int = setting(7103, "Port to listen on; 0 takes a free one.")


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
