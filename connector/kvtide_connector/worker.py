"""Worker side of the connector: reads that end at their deadline, and blocks that no late write can reach."""

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from kvtide.directive import PARAMS_KEY
from kvtide_connector.agent import progress_thread_delay
from kvtide_connector.clock import Clock, host_boot_id
from kvtide_connector.stats import KvtideStats
from kvtide_connector.transfer import LoadDeadlines, WorkerReport

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata, ReqMeta
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.kvtide.worker")

_TICKET_NOTIFICATION = f"{PARAMS_KEY}-".encode()


class _NotificationFilter:
    """Keeps the notifications of tickets from vLLM, which would log each as an invalid read."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        notifications: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return {
            agent: [message for message in messages if not message.startswith(_TICKET_NOTIFICATION)]
            for agent, messages in notifications.items()
        }


class KvtideWorker(NixlPullConnectorWorker):
    """vLLM's pull worker with a deadline on each load.

    A load that is over its deadline counts as failed, also when it completed: the owner may have reused the blocks. One
    whose transfer hangs is reported failed at once and its handles are kept until NIXL lets them go; the scheduler side
    keeps the target blocks as long.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        engine_id: str,
        kv_cache_config: "KVCacheConfig",
        progress_delay_us: int,
        clock: Clock,
    ) -> None:
        with progress_thread_delay(progress_delay_us):
            super().__init__(vllm_config, engine_id, kv_cache_config)
        self.nixl_wrapper = _NotificationFilter(self.nixl_wrapper)
        self.xfer_stats = KvtideStats()
        self._clock = clock
        self._host = host_boot_id()
        self._deadlines: dict[str, int] = {}
        self._hung: dict[str, list[int]] = {}
        self._stuck: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def start_load_kv(self, metadata: "NixlConnectorMetadata") -> None:
        """Starts the step's loads under their deadlines."""
        loads: LoadDeadlines | None = getattr(metadata, "kvtide", None)
        if loads is not None:
            self._deadlines.update(loads.on(self._host, self._clock))
        super().start_load_kv(metadata)

    def _read_blocks_for_req(self, req_id: str, meta: "ReqMeta") -> None:
        """Posts the read, unless a slow handshake outlived the request's deadline."""
        if meta.awaiting_kvs and req_id not in self._recving_metadata:
            return
        super()._read_blocks_for_req(req_id, meta)

    def get_transfer_results(self) -> "KVConnectorTransferResults":
        """vLLM's results, with overdue loads among the failed, and without what was sent: no request waits for that."""
        self._poll_hung()
        now = self._clock()
        for req_id in [i for i, at in self._deadlines.items() if at <= now]:
            self._give_up(req_id)
        results = super().get_transfer_results()
        for req_id in results.finished_recving:
            self._deadlines.pop(req_id, None)
        self._sent.update(results.finished_sending)
        results.finished_sending.clear()
        return results

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        """Counts as failed what completed after its deadline."""
        done, failed = super()._pop_done_transfers(transfers)
        now = self._clock()
        late = {req_id for req_id in done - failed if self._deadlines.get(req_id, now + 1) <= now}
        if late:
            self._counts["loads_late"] += len(late)
        return done, failed | late

    def _give_up(self, req_id: str) -> None:
        """Fails a load whose time is up; a transfer in progress is set aside with its handles."""
        if req_id not in self._recving_metadata:
            self._deadlines.pop(req_id)
            return
        handles = self._recving_transfers.get(req_id)
        if handles is None:
            self._deadlines.pop(req_id)
            self._recv_failures.add(req_id)
            self._counts["handshakes_late"] += 1
        elif any(self._in_progress(handle) for handle in handles):
            self._deadlines.pop(req_id)
            self._hung[req_id] = self._recving_transfers.pop(req_id)
            self._stuck[req_id] += 1
            self._recv_failures.add(req_id)
            self._counts["loads_hung"] += 1
            logger.warning("Gave up the load of request %s; its blocks stay aside until the transfer is gone", req_id)

    def _in_progress(self, handle: int) -> bool:
        try:
            return bool(self.nixl_wrapper.check_xfer_state(handle) == "PROC")
        except Exception:  # NIXL raises its own types for each backend fault; the stock path reports it
            return False

    def _poll_hung(self) -> None:
        for req_id, handles in list(self._hung.items()):
            handles[:] = [handle for handle in handles if not self._let_go(req_id, handle)]
            if not handles:
                del self._hung[req_id]
                self._stuck[req_id] -= 1

    def _let_go(self, req_id: str, handle: int) -> bool:
        return not self._in_progress(handle) and self._try_release_xfer_handle(req_id, handle)

    def take_report(self) -> WorkerReport | None:
        """What the scheduler side must know; None when nothing."""
        report = WorkerReport(self._stuck, self._sent, self._counts)
        self._stuck, self._sent, self._counts = Counter(), Counter(), Counter()
        return report if report else None
