"""Settings of the connector, from ``kv_connector_extra_config``."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtide_connector.clock import SECOND


@dataclass(frozen=True)
class ConnectorSettings:
    """Keys without the prefix ``kvtide_`` are vLLM's own and mean what they mean there; times are in seconds."""

    bidirectional_kv_xfer: bool = False
    """D holds finished turns when the gateway asks, P reads them back."""
    decoder_kv_blocks_ttl: float = 120.0
    """How long D holds the blocks of a turn without a renewal."""
    kv_recompute_threshold: int = 64
    """Fewer reusable tokens than this are recomputed."""
    kvtide_lease_address: str = ""
    """host:port of the lease service; empty: no link, every turn is computed afresh."""
    kvtide_engine_name: str = ""
    """Stable name of this engine; default: role, host and side-channel port."""
    kvtide_http_url: str = ""
    """Base URL of this engine's HTTP server as the gateway reaches it."""
    kvtide_side_channel_host: str = ""
    """Address that peers use for the NIXL handshake; default: VLLM_NIXL_SIDE_CHANNEL_HOST."""
    kvtide_shared_key_file: str = ""
    """File with the key that the gateway signs directives with; empty: the empty key."""
    kvtide_api_key_file: str = ""
    """File with the operator's API key for the lease service; empty: none is sent."""
    kvtide_ask_timeout: float = 1.0
    """How long P waits for a ticket before it recomputes."""
    kvtide_ask_poll: float = 0.002
    """How long one scheduler step waits for a ticket while nothing else runs."""
    kvtide_ticket_duration: float = 30.0
    """The longest promise that D gives to one reader, and what P asks for."""
    kvtide_ticket_margin: float = 0.5
    """Taken off a reader's deadline, besides 1 %."""
    kvtide_ticket_pool_share: float = 0.5
    """Open tickets may cover this share of the KV pool."""
    kvtide_read_timeout: float = 10.0
    """A handshake and read that take longer are given up and recomputed."""
    kvtide_reserve_share: float = 0.02
    """Holds give way as soon as less than this share of the pool is free."""
    kvtide_leases_per_session: int = 8
    """Branches of one session that are held at once; the least recently used goes."""
    kvtide_session_tokens: int = 0
    """Tokens held for one session at most, shared ones once; beyond, its least valuable lease goes. 0: no limit."""
    kvtide_tenant_tokens: int = 0
    """The same for one tenant."""
    kvtide_lease_ttl_max: float = 3600.0
    """A renewal grants no more than this."""
    kvtide_value_half_life: float = 60.0
    """Idle time after which a lease is worth half as much when holds must give way."""
    kvtide_value_long_tokens: int = 32768
    """Length of a conversation whose recomputation costs twice as much a token as a short one's."""
    kvtide_link_retry: float = 0.5
    """Pause before the engine link is opened again."""
    kvtide_progress_thread_delay_us: int = -1
    """Pause of NIXL's progress thread between polls; 0 spins a core; -1: 100 on CPU, else 0."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, float) and not value > 0:
                raise ValueError(f"{field.name} must be above 0, not {value!r}")
        for name in ("kvtide_ticket_pool_share", "kvtide_reserve_share"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is a share, at most 1")
        if self.kv_recompute_threshold < 0 or self.kvtide_leases_per_session < 1:
            raise ValueError("kv_recompute_threshold must not be negative, kvtide_leases_per_session at least 1")
        if min(self.kvtide_session_tokens, self.kvtide_tenant_tokens) < 0 or self.kvtide_value_long_tokens < 1:
            raise ValueError("limits in tokens must not be negative, kvtide_value_long_tokens at least 1")
        if self.kvtide_lease_ttl_max < self.decoder_kv_blocks_ttl:
            raise ValueError("kvtide_lease_ttl_max must not be below decoder_kv_blocks_ttl")
        if self.kvtide_ticket_margin * 2 >= self.kvtide_ticket_duration:
            raise ValueError("kvtide_ticket_margin must be less than half of kvtide_ticket_duration")

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> "ConnectorSettings":
        """Raises ValueError for an unknown ``kvtide_`` key, a wrong type, or a value out of range."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        unknown = [key for key in extra if key.startswith("kvtide_") and key not in known]
        if unknown:
            raise ValueError(f"unknown connector settings: {', '.join(sorted(unknown))}")
        return cls(**{key: _typed(known[key], extra[key]) for key in extra if key in known})

    def shared_key(self) -> bytes:
        """The HMAC key; empty without a file. Raises OSError."""
        return _read(self.kvtide_shared_key_file)

    def api_key(self) -> str:
        """The operator's API key; empty without a file. Raises OSError."""
        return _read(self.kvtide_api_key_file).decode()


def _read(path: str) -> bytes:
    return Path(path).read_bytes().strip() if path else b""


def _typed(field: "dataclasses.Field[Any]", value: Any) -> Any:
    kind = type(field.default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{field.name} must be a {kind.__name__}, not {value!r}")
    return value


def nanoseconds(seconds: float) -> int:
    """Seconds as the connector's clock counts them."""
    return int(seconds * SECOND)
