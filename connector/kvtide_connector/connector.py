"""The class that vLLM loads: ``kv_connector`` "KvtideConnector", ``kv_connector_module_path`` this module."""

import logging
import uuid
from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector
from vllm.platforms import current_platform

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_connector.clock import boottime_ns
from kvtide_connector.dialogue import Dialogue
from kvtide_connector.holds import EndReason, Lease, Limits, Refusal
from kvtide_connector.lessor import Lessor
from kvtide_connector.link import EngineLink
from kvtide_connector.pairing import pairing_digest
from kvtide_connector.pool import PinnedPool
from kvtide_connector.reader import Reader
from kvtide_connector.scheduler import KvtideScheduler
from kvtide_connector.settings import ConnectorSettings, nanoseconds
from kvtide_connector.stats import Counts, KvtidePromMetrics, KvtideStats
from kvtide_connector.value import Worth
from kvtide_connector.worker import KvtideWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.kvtide")

_CPU_PROGRESS_DELAY_US = 100


class KvtideConnector(NixlPullConnector):
    """vLLM's NixlConnector whose KV flows both ways under leases and is verified in both directions."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        """Raises ValueError when the engine is configured in a way that could break a promise."""
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        settings = ConnectorSettings.from_extra_config(self.kv_transfer_config.kv_connector_extra_config)
        _check(vllm_config)
        self._settings = settings
        self._counts = Counts()
        self._link: EngineLink | None = None
        if role == KVConnectorRole.WORKER:
            delay = settings.kvtide_progress_thread_delay_us
            if delay < 0:
                delay = _CPU_PROGRESS_DELAY_US if current_platform.is_cpu() else 0
            self.connector_worker = KvtideWorker(vllm_config, self.engine_id, kv_cache_config, delay, boottime_ns)
            return
        # A failed load must end in recomputation; the scheduler reads this after the connector is made.
        self.kv_transfer_config.kv_load_failure_policy = "recompute"
        self._digest = pairing_digest(vllm_config, vllm_version)
        self._vllm_config = vllm_config
        self.connector_scheduler = KvtideScheduler(
            vllm_config, self.engine_id, kv_cache_config, settings, self._digest, boottime_ns, self._counts
        )

    # Scheduler side.

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """The pool exists: holds can be made, the engine can register."""
        scheduler = self._scheduler()
        pool = PinnedPool(gpu_block_pool)
        scheduler.pool = pool
        engine = self._engine(scheduler, pool)
        dialogue = Dialogue(engine, boottime_ns, self._load)
        settings = self._settings
        if settings.bidirectional_kv_xfer and engine.role == pb.ENGINE_ROLE_DECODE:
            limits, worth = _limits(settings, engine.block_size), _worth(settings, engine.block_size)
            observer = _Observer(dialogue, self._counts)
            scheduler.lessor = Lessor(pool, boottime_ns, limits, worth, _new_id, observer)
            pool.before_reset(scheduler.lessor.reset)
            dialogue.speaks_for(scheduler.lessor)
        elif settings.bidirectional_kv_xfer:
            scheduler.reader = Reader(dialogue, settings, engine.block_size, self._digest, boottime_ns, _new_id)
        if settings.kvtide_lease_address:
            retry = settings.kvtide_link_retry
            self._link = EngineLink(dialogue, settings.kvtide_lease_address, settings.api_key(), retry)
            self._link.start()

    def _scheduler(self) -> KvtideScheduler:
        assert isinstance(self.connector_scheduler, KvtideScheduler)
        return self.connector_scheduler

    def _engine(self, scheduler: KvtideScheduler, pool: PinnedPool) -> pb.Engine:
        config, settings = self._vllm_config, self._settings
        prefill = self.kv_transfer_config.is_kv_producer
        host, port = scheduler.side_channel_host, scheduler.side_channel_port
        role = "prefill" if prefill else "decode"
        served = config.model_config.served_model_name
        return pb.Engine(
            name=settings.kvtide_engine_name or f"{role}-{host}-{port}",
            boot_id=self.engine_id,
            role=pb.ENGINE_ROLE_PREFILL if prefill else pb.ENGINE_ROLE_DECODE,
            model=served[0] if isinstance(served, list) else served,
            http_url=settings.kvtide_http_url,
            side_channel_host=host,
            side_channel_port=port,
            tensor_parallel_size=scheduler.transfer_tp_size,
            block_size=scheduler.block_size,
            num_blocks=pool.num_blocks(),
            pairing_digest=self._digest,
            vllm_version=vllm_version,
        )

    def _load(self) -> pb.Beat:
        scheduler = self._scheduler()
        held = scheduler.lessor.held_blocks() if scheduler.lessor else 0
        free = scheduler.pool.num_free() if scheduler.pool else 0
        return pb.Beat(
            free_blocks=free, held_tokens=held * scheduler.block_size, running_requests=scheduler.open_requests()
        )

    def has_pending_block_frees(self) -> bool:
        """Whether blocks were freed for a running request that found none."""
        return self._scheduler().has_pending_block_frees()

    def reset_cache(self) -> bool:
        """Ends every lease."""
        scheduler = self._scheduler()
        if scheduler.lessor is not None:
            scheduler.lessor.reset()
        return True

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        """The worker's transfers, or the scheduler side's counts."""
        if self.connector_worker is not None:
            return super().get_kv_connector_stats()
        counts = self._counts.take()
        return KvtideStats.of(counts) if counts else None

    def shutdown(self) -> None:
        """Closes the link; the lease service then drops what this engine held."""
        if self._link is not None:
            self._link.close()
        super().shutdown()

    # Worker side.

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Hung transfers and counts of this step."""
        assert isinstance(self.connector_worker, KvtideWorker)
        return self.connector_worker.take_report()

    # Metrics.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> "KVConnectorStats | None":
        """Statistics from their serialised form."""
        return KvtideStats(data=data) if data is not None else KvtideStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "KVConnectorPromMetrics":
        """NIXL's Prometheus metrics and ours."""
        return KvtidePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class _Observer:
    """Counts transitions and reports leases over the link."""

    def __init__(self, dialogue: Dialogue, counts: Counts) -> None:
        self._dialogue = dialogue
        self._counts = counts

    def granted(self, lease: Lease) -> None:
        self._counts.add("leases_granted")
        self._dialogue.granted(lease)

    def changed(self, lease: Lease) -> None:
        self._dialogue.granted(lease)

    def ended(self, lease: Lease, reason: EndReason, continued: bool) -> None:
        self._counts.add(f"leases_{reason.value}")
        if not continued:
            self._dialogue.ended(lease, reason)

    def ticketed(self, refusal: Refusal | None) -> None:
        self._counts.add("tickets_refused" if refusal else "tickets_granted")


def _new_id() -> str:
    return uuid.uuid4().hex


def _limits(settings: ConnectorSettings, block_size: int) -> Limits:
    return Limits(
        lease_ttl=nanoseconds(settings.decoder_kv_blocks_ttl),
        longest_ttl=nanoseconds(settings.kvtide_lease_ttl_max),
        ticket_duration=nanoseconds(settings.kvtide_ticket_duration),
        ticket_pool_share=settings.kvtide_ticket_pool_share,
        leases_per_session=settings.kvtide_leases_per_session,
        session_blocks=_whole_blocks(settings.kvtide_session_tokens, block_size),
        tenant_blocks=_whole_blocks(settings.kvtide_tenant_tokens, block_size),
    )


def _whole_blocks(tokens: int, block_size: int) -> int:
    """0, which is no limit, only for 0."""
    return max(1, tokens // block_size) if tokens else 0


def _worth(settings: ConnectorSettings, block_size: int) -> Worth:
    long_blocks = max(1, settings.kvtide_value_long_tokens // block_size)
    return Worth(nanoseconds(settings.kvtide_value_half_life), long_blocks)


def _check(vllm_config: "VllmConfig") -> None:
    transfer, cache = vllm_config.kv_transfer_config, vllm_config.cache_config
    if transfer.kv_role not in ("kv_producer", "kv_consumer"):
        raise ValueError(f"kv_role must be kv_producer (prefill) or kv_consumer (decode), not {transfer.kv_role!r}")
    try:
        uuid.UUID((transfer.engine_id or "").split("_dp")[0])
    except ValueError:
        raise ValueError(
            "engine_id must be left unset: vLLM then makes a fresh one at each start, and an engine that returns under "
            "an old id would be taken for the one whose blocks are gone"
        ) from None
    if not str(cache.prefix_caching_hash_algo).startswith("sha256"):
        raise ValueError("prefix_caching_hash_algo must be sha256 or sha256_cbor: fingerprints prove equality by it")
