"""Counters of the connector, carried by vLLM's own connector statistics to the engine's /metrics."""

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics
from vllm.v1.metrics.utils import create_metric_per_engine

COUNTERS = {
    "leases_granted": "Leases granted at the end of a turn.",
    "leases_superseded": "Leases that a longer one of their branch took over.",
    "leases_released": "Leases released by their session.",
    "leases_expired": "Leases that ended at their deadline.",
    "leases_evicted": "Leases freed for live requests.",
    "leases_lost": "Leases ended by a cache reset.",
    "tickets_granted": "Tickets given to readers.",
    "tickets_refused": "Tickets refused to readers.",
    "ask_microseconds": "Time that requests waited for tickets, in microseconds.",
    "loads_done": "Remote loads that completed in time.",
    "loads_failed": "Remote loads that ended in recomputation.",
    "loads_late": "Reads that completed after their deadline and were thrown away.",
    "loads_hung": "Reads still in progress at their deadline, set aside with their blocks.",
    "handshakes_late": "Loads given up before their handshake was done.",
    "prefill_mismatch": "P's digest differed from D's prompt: not read.",
    "prefill_late": "P's blocks might have been freed before D could read: not read.",
    "prefill_malformed": "P's reference did not fit the prompt: not read.",
    "prefill_other_weights": "P runs other weights or another configuration: not read.",
    "directives_refused": "Requests with kv_transfer_params that no gateway signed: computed without transfer.",
    "room_made": "Times that holds gave way to a request.",
}


class Counts:
    """Counts between two scrapes of the engine; thread-safe."""

    def __init__(self) -> None:
        self._counter: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """``name`` is a key of COUNTERS."""
        with self._lock:
            self._counter[name] += amount

    def add_all(self, amounts: Mapping[str, int]) -> None:
        """Adds many."""
        with self._lock:
            self._counter.update(amounts)

    def take(self) -> dict[str, int]:
        """The counts since the last call."""
        with self._lock:
            taken, self._counter = dict(self._counter), Counter()
            return taken


class KvtideStats(NixlKVConnectorStats):
    """NIXL's statistics and ours, as one serialisable dict of lists."""

    def reset(self) -> None:
        """Forgets everything."""
        super().reset()
        for name in COUNTERS:
            self.data[name] = []

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> "KvtideStats":
        """Statistics that hold only these counts."""
        stats = cls()
        for name, amount in counts.items():
            stats.data[name].append(amount)
        return stats

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return super().is_empty() and not any(self.data[name] for name in COUNTERS)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds another process's statistics."""
        for name, values in other.data.items():
            self.data.setdefault(name, []).extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: NIXL's figures and our counts above 0."""
        ours = {name.replace("_", " "): sum(self.data[name]) for name in COUNTERS if self.data[name]}
        return {**super().reduce(), **ours}


class KvtidePromMetrics(NixlPromMetrics):
    """NIXL's metrics and one counter ``kvtide:<name>`` for each of COUNTERS."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._kvtide = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"kvtide:{name}", documentation=text, labelnames=labelnames),
                self.per_engine_labelvalues,
            )
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one report."""
        super().observe(transfer_stats_data, engine_idx)
        for name, metric in self._kvtide.items():
            for amount in transfer_stats_data.get(name, ()):
                metric[engine_idx].inc(amount)
