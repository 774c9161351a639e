"""Scheduler side of the connector: verification in both directions, holds on D, reads on P."""

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvtide import directive as directives
from kvtide.lease.v1 import directive_pb2
from kvtide_connector import wire
from kvtide_connector.clock import Clock, host_boot_id, reader_deadline
from kvtide_connector.holds import Owner
from kvtide_connector.lessor import Lessor
from kvtide_connector.offers import Offers
from kvtide_connector.reader import Reader
from kvtide_connector.settings import ConnectorSettings, nanoseconds
from kvtide_connector.stats import Counts
from kvtide_connector.transfer import LoadDeadlines, WorkerReport
from kvtide_connector.turn import Load, Turn

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvtide_connector.pool import PinnedPool

logger = logging.getLogger("vllm.kvtide.scheduler")

PREFILL_KEY = "kvtide_prefill"
"""Key in P's response, beside vLLM's own, that tells the gateway what D needs to verify."""


class KvtideScheduler(NixlPullConnectorScheduler):
    """Obeys directives only: other ``kv_transfer_params`` are ignored."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        engine_id: str,
        kv_cache_config: "KVCacheConfig",
        settings: ConnectorSettings,
        pairing_digest: str,
        clock: Clock,
        counts: Counts,
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.side_channel_host = settings.kvtide_side_channel_host or self.side_channel_host
        self._settings = settings
        self._pairing_digest = pairing_digest
        self._clock = clock
        self._counts = counts
        self._key = settings.shared_key()
        self._host = host_boot_id()
        self._turns: dict[str, Turn] = {}
        self._stuck: dict[str, int] = {}
        self._waited = False
        self._offers = Offers(vllm_config.parallel_config.world_size)
        self._can_cut = _can_cut(kv_cache_config)
        self.pool: PinnedPool | None = None
        self.lessor: Lessor | None = None
        self.reader: Reader | None = None

    # Requests come.

    def on_new_request(self, request: "Request") -> None:
        """Replaces the request's params by what its directive allows, and starts the ask of a prefill leg."""
        params = request.kv_transfer_params
        request.kv_transfer_params = None
        turn = self._admit(params)
        if turn is not None:
            self._turns[request.request_id] = turn
            if turn.directive.leg == directive_pb2.LEG_PREFILL:
                request.kv_transfer_params = {"do_remote_decode": True, "do_remote_prefill": False}
                self._ask(turn, request)
            elif turn.directive.HasField("prefill") and params is not None:
                self._accept_prefill(turn, request, params)
        super().on_new_request(request)

    def _admit(self, params: dict[str, Any] | None) -> Turn | None:
        if not params:
            return None
        try:
            return Turn(directives.decode(params.get(directives.PARAMS_KEY), self._key))
        except directives.DirectiveError as error:
            self._counts.add("directives_refused")
            logger.warning("Ignored kv_transfer_params of a request: %s", error)
            return None

    def _ask(self, turn: Turn, request: "Request") -> None:
        if not turn.directive.HasField("lease"):
            return
        if self.reader is None or not self._can_cut or not self._hashes_fit(request):
            turn.reason = "this engine cannot reuse"
            return
        self.reader.ask(turn, request.block_hashes, request.num_prompt_tokens)

    def _hashes_fit(self, request: "Request") -> bool:
        return len(request.block_hashes) == request.num_tokens // self.block_size

    def _accept_prefill(self, turn: Turn, request: "Request", params: dict[str, Any]) -> None:
        """Lets vLLM read P's blocks only when they are proven to be those of this prompt."""
        stock = {key: value for key, value in params.items() if key != directives.PARAMS_KEY}
        problem = self._prefill_problem(turn.directive.prefill, request, stock)
        if not problem:
            prefill = turn.directive.prefill
            margin = nanoseconds(self._settings.kvtide_ticket_margin)
            promised = wire.nanoseconds(prefill.lease_duration)
            turn.deadline = reader_deadline(prefill.reader_clock_stamp, promised, margin)
            if self._clock() >= turn.deadline:
                problem = "prefill_late"
        if problem:
            self._counts.add(problem)
            logger.warning("Does not read the prefill of request %s: %s", request.request_id, problem)
            if problem == "prefill_mismatch" and _referred_blocks(stock) is not None:
                self._decline(request, stock)
            return
        request.kv_transfer_params = {**stock, "do_remote_prefill": True, "do_remote_decode": False}
        turn.load = Load.READY

    def _decline(self, request: "Request", stock: dict[str, Any]) -> None:
        """Tells P that its blocks are not wanted: an empty read is vLLM's way to say so."""
        request.kv_transfer_params = {**stock, "do_remote_prefill": False}
        self._reqs_need_recv[request.request_id] = (request, (), (), False)

    def _prefill_problem(self, prefill: directive_pb2.PrefillRef, request: "Request", stock: dict[str, Any]) -> str:
        """A counter's name, or nothing when P's digest equals this prompt's."""
        prompt = request.prompt_token_ids or []
        whole = len(prompt) // self.block_size
        if prefill.pairing_digest != self._pairing_digest:
            return "prefill_other_weights"
        if not whole or not self._hashes_fit(request) or prefill.num_tokens != len(prompt):
            return "prefill_mismatch"
        if request.block_hashes[whole - 1] != prefill.last_block_hash:
            return "prefill_mismatch"
        if list(prompt[whole * self.block_size :]) != list(prefill.tail_token_ids):
            return "prefill_mismatch"
        return "" if _referred_blocks(stock) == -(-len(prompt) // self.block_size) else "prefill_malformed"

    def open_requests(self) -> int:
        """Requests with a directive that have not ended."""
        return len(self._turns)

    # Requests are scheduled.

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens to load beyond the local ones; None while the ticket's answer is awaited, which has a deadline."""
        self._make_room(request)
        turn = self._turns.get(request.request_id)
        if turn is None or turn.load in (Load.NONE, Load.LOADING, Load.OVER):
            return 0, False
        if turn.directive.leg == directive_pb2.LEG_DECODE:
            return self._prefilled_tokens(turn, request, num_computed_tokens)
        assert self.reader is not None
        wait = 0.0 if self._waited else self._settings.kvtide_ask_poll
        self._waited = True
        asked = turn.load is Load.ASKED
        if not self.reader.poll(turn, request.block_hashes, request.num_prompt_tokens, wait):
            return None, False
        if asked:
            self._counts.add("ask_microseconds", (self._clock() - turn.asked_at) // 1000)
        tokens = self.reader.count(turn, num_computed_tokens)
        return tokens, tokens > 0

    def _prefilled_tokens(self, turn: Turn, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._clock() >= turn.deadline:
            self._counts.add("prefill_late")
            turn.load = Load.OVER
            self._stop_heartbeat(request.request_id)
            request.kv_transfer_params = None
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def _make_room(self, request: "Request") -> None:
        """Holds give way before the allocation that follows this call."""
        if self.lessor is None or self.pool is None:
            return
        need = -(-request.num_tokens // self.block_size) + 1 + self._reserve()
        if self.lessor.make_room(min(need, self.pool.num_blocks())):
            self._counts.add("room_made")

    def _reserve(self) -> int:
        assert self.pool is not None
        return max(2, int(self.pool.num_blocks() * self._settings.kvtide_reserve_share))

    def has_pending_block_frees(self) -> bool:
        """A running request found no block: frees some, so that it is scheduled next instead of preempted."""
        if self.lessor is None or self.pool is None:
            return False
        return self.lessor.make_room(self.pool.num_free() + self._reserve())

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Starts the load that was just given its blocks."""
        turn = self._turns.get(request.request_id)
        if turn is not None and turn.load is Load.READY and num_external_tokens > 0:
            turn.load = Load.LOADING
            turn.loaded_tokens = num_external_tokens
            self._pin_targets(turn, blocks, num_external_tokens)
            if turn.directive.leg == directive_pb2.LEG_PREFILL:
                self._read_lease(turn, request)
                return
        elif turn is not None and turn.load is Load.READY:
            self._skip_load(turn)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def _skip_load(self, turn: Turn) -> None:
        """Local blocks made the load unnecessary, or the request may not use any."""
        if turn.directive.leg == directive_pb2.LEG_PREFILL and self.reader is not None:
            self.reader.give_up(turn, "nothing left to read")
        turn.load = Load.OVER

    def _pin_targets(self, turn: Turn, blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """The target blocks outlive their request for as long as a transfer may still write into them."""
        if self.pool is None:
            return
        last = -(-num_external_tokens // self.block_size)
        fresh = [b.block_id for b in blocks.blocks[0] if b.block_hash is None and not b.is_null][:last]
        self.pool.pin(fresh)
        turn.pinned = fresh

    def _read_lease(self, turn: Turn, request: "Request") -> None:
        assert turn.ticket is not None
        first, last = turn.local_blocks, turn.verified
        local, holder = turn.pinned[: last - first], turn.ticket.holder
        request.kv_transfer_params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_block_ids": (list(turn.ticket.block_ids[first:last]),),
            "remote_engine_id": holder.boot_id,
            "remote_request_id": f"{directives.PARAMS_KEY}-{turn.ticket_id}",
            "remote_host": holder.side_channel_host,
            "remote_port": holder.side_channel_port,
            "tp_size": holder.tensor_parallel_size,
            "remote_num_tokens": last * self.block_size,
        }
        self._reqs_in_batch.add(request.request_id)
        self._reqs_need_recv[request.request_id] = (request, (local,), (first,), True)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> Any:
        """The step's metadata, with the deadlines of the loads that it starts."""
        self._waited = False
        started = [request_id for request_id in self._reqs_need_recv if request_id in self._turns]
        now = self._clock()
        deadlines = {i: self._read_deadline(self._turns[i], now) for i in started}
        meta = super().build_connector_meta(scheduler_output)
        meta.kvtide = LoadDeadlines(self._host, now, {i: at for i, at in deadlines.items() if at})
        if self.lessor is not None:
            self.lessor.step()
        return meta

    def _read_deadline(self, turn: Turn, now: int) -> int:
        if turn.load is not Load.LOADING:
            return 0
        return min(turn.deadline, now + nanoseconds(self._settings.kvtide_read_timeout))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Loads that ended, and transfers that hung and are gone now."""
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._take(report)
        failed = connector_output.failed_recving or ()
        for request_id in connector_output.finished_recving or ():
            self._load_over(request_id, request_id in failed)
        self._release_drained()

    def _take(self, report: WorkerReport) -> None:
        self._counts.add_all(report.counts)
        for request_id, change in report.stuck.items():
            self._stuck[request_id] = self._stuck.get(request_id, 0) + change
        for request_id, workers in report.sent.items():
            assert self.pool is not None
            self._offers.over(self.pool, request_id, workers)

    def _load_over(self, request_id: str, failed: bool) -> None:
        turn = self._turns.get(request_id)
        if turn is None or turn.load is not Load.LOADING:
            return
        turn.load = Load.OVER
        if failed:
            turn.reason, turn.loaded_tokens = "the read failed or came too late", 0
        self._counts.add("loads_failed" if failed else "loads_done")
        if self.reader is not None and turn.directive.leg == directive_pb2.LEG_PREFILL:
            self.reader.done(turn)
        self._stuck.setdefault(request_id, 0)

    def _release_drained(self) -> None:
        for request_id in [i for i, count in self._stuck.items() if count == 0]:
            turn = self._turns.get(request_id)
            if turn is not None and turn.load is Load.LOADING:
                continue
            del self._stuck[request_id]
            if turn is not None:
                self._unpin(request_id, turn)

    def _unpin(self, request_id: str, turn: Turn) -> None:
        if self.pool is not None and turn.pinned:
            self.pool.unpin(turn.pinned)
        turn.pinned = []
        if turn.ended:
            del self._turns[request_id]

    # Requests end.

    def request_finished(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Holds what the gateway asked to hold (D), exports what D must verify (P)."""
        turn = self._turns.get(request.request_id)
        if turn is None:
            return super().request_finished(request, block_ids)
        turn.ended = True
        if turn.directive.leg == directive_pb2.LEG_PREFILL:
            result = self._finish_prefill(turn, request, block_ids)
        else:
            result = self._finish_decode(turn, request, block_ids)
        if turn.load is not Load.LOADING and not turn.pinned:
            self._turns.pop(request.request_id, None)
        return result

    def _finish_prefill(
        self, turn: Turn, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.reader is not None and turn.load in (Load.ASKED, Load.READY):
            self.reader.give_up(turn, "the request ended first")
        offered, params = super().request_finished(request, block_ids)
        if offered:
            assert self.pool is not None
            self._offers.make(self.pool, request.request_id, [block for group in block_ids for block in group])
        if params is None or not self._hashes_fit(request):
            return False, params
        prompt = request.prompt_token_ids or []
        whole = len(prompt) // self.block_size
        params[PREFILL_KEY] = {
            "num_tokens": len(prompt),
            "last_block_hash": bytes(request.block_hashes[whole - 1]).hex() if whole else "",
            "tail_token_ids": list(prompt[whole * self.block_size :]),
            "lease_duration_s": float(self._kv_lease_duration),
            "pairing_digest": self._pairing_digest,
            "reused_tokens": turn.loaded_tokens,
            "reason": turn.reason,
        }
        return False, params

    def _finish_decode(
        self, turn: Turn, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params
        if params is not None and params.get("do_remote_prefill"):
            return super().request_finished(request, block_ids)
        self._stop_heartbeat(request.request_id)
        self._reqs_not_processed.add(request.request_id)
        if turn.directive.retain and turn.load is not Load.LOADING:
            self._hold(turn, request, block_ids)
        return False, None

    def _hold(self, turn: Turn, request: "Request", block_ids: tuple[list[int], ...]) -> None:
        if self.lessor is None or not self._can_cut:
            return
        whole = min(valid_tokens(request) // self.block_size, len(request.block_hashes), len(block_ids[0]))
        if whole == 0:
            return
        owner = Owner(turn.directive.tenant, turn.directive.session_id)
        hashes = [bytes(block_hash) for block_hash in request.block_hashes[:whole]]
        self.lessor.grant(owner, turn.directive.turn, hashes, block_ids[0][:whole])


def valid_tokens(request: "Request") -> int:
    """Tokens whose KV exists: computed, not in flight, and never the last sampled one."""
    return max(0, min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - 1))


def _can_cut(kv_cache_config: "KVCacheConfig") -> bool:
    """Whether a prefix of the blocks is a prefix of the KV: one group of full attention."""
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)


def _referred_blocks(stock: dict[str, Any]) -> int | None:
    """Blocks that P's reference names; None for a reference that vLLM could not use. No directive signs it."""
    fields = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")
    groups = stock.get("remote_block_ids")
    if not all(stock.get(name) for name in fields) or not isinstance(groups, list | tuple) or len(groups) != 1:
        return None
    return len(groups[0]) if isinstance(groups[0], list | tuple) else None
