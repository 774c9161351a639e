"""What the scheduler side and the worker side tell each other, beside vLLM's own metadata."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from kvtide_connector.clock import Clock


@dataclass(frozen=True)
class LoadDeadlines:
    """When the loads that a step starts must be over, on the scheduler's clock."""

    host: str
    """Boot id of the scheduler's host: readings compare directly only under the same one."""
    now: int
    deadlines: dict[str, int]

    def on(self, host: str, clock: Clock) -> dict[str, int]:
        """The deadlines on the clock of a worker of ``host``."""
        shift = 0 if host == self.host else clock() - self.now
        return {request_id: at + shift for request_id, at in self.deadlines.items()}


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What a worker has to say of a step, by request.

    ``stuck`` counts transfers that hung past their deadline (+1) and are gone now (-1), ``sent`` workers for which an
    offer is over: read, or run out.
    """

    stuck: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Adds another worker's report."""
        assert isinstance(other, WorkerReport)
        total = WorkerReport(self.stuck.copy(), self.sent.copy(), self.counts.copy())
        total.stuck.update(other.stuck)
        total.sent.update(other.sent)
        total.counts.update(other.counts)
        return total

    def __bool__(self) -> bool:
        return bool(self.stuck or self.sent or self.counts)
