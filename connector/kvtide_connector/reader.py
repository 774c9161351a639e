"""P's side of a D→P read: asks for a ticket, verifies block by block, decides what is read. Knows no vLLM."""

from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_connector import wire
from kvtide_connector.clock import Clock, reader_deadline
from kvtide_connector.dialogue import Dialogue
from kvtide_connector.fingerprint import common_blocks, hash_prefixes
from kvtide_connector.settings import ConnectorSettings, nanoseconds
from kvtide_connector.turn import Load, Turn


class Reader:
    """Takes a turn through ASKED and READY. Every path ends in READY or OVER by the ask's deadline."""

    def __init__(
        self,
        link: Dialogue,
        settings: ConnectorSettings,
        block_size: int,
        pairing_digest: str,
        clock: Clock,
        new_id: Callable[[], str],
    ) -> None:
        self._link = link
        self._settings = settings
        self._block_size = block_size
        self._pairing_digest = pairing_digest
        self._clock = clock
        self._new_id = new_id

    def ask(self, turn: Turn, hashes: Sequence[bytes], prompt_tokens: int) -> None:
        """Asks for what the plan named, unless the prompt is too short to reuse anything."""
        usable = self._usable(hashes, prompt_tokens)
        if len(usable) * self._block_size < max(1, self._settings.kv_recompute_threshold):
            turn.reason = "prompt below the recompute threshold"
            return
        lease, directive = turn.directive.lease, turn.directive
        turn.ticket_id = self._new_id()
        turn.asked_at = self._clock()
        turn.load = Load.ASKED
        turn.answer = self._link.ask(
            pb.TicketRequest(
                ticket_id=turn.ticket_id,
                tenant=directive.tenant,
                session_id=directive.session_id,
                lease_id=lease.lease_id,
                engine=lease.engine,
                boot_id=lease.boot_id,
                prompt_hash_prefixes=hash_prefixes(usable),
                duration=wire.duration(nanoseconds(self._settings.kvtide_ticket_duration)),
                attempt_id=directive.attempt_id,
            )
        )

    def poll(self, turn: Turn, hashes: Sequence[bytes], prompt_tokens: int, wait: float) -> bool:
        """Takes the answer in, waiting at most ``wait`` seconds; False while it is still to come."""
        if turn.load is not Load.ASKED or turn.answer is None:
            return True
        try:
            response = turn.answer.result(timeout=wait)
        except FutureTimeout:
            if self._clock() - turn.asked_at < nanoseconds(self._settings.kvtide_ask_timeout):
                return False
            self.give_up(turn, "no ticket in time")
            return True
        self._take(turn, response, self._usable(hashes, prompt_tokens))
        return True

    def count(self, turn: Turn, local_tokens: int) -> int:
        """Tokens to read beyond ``local_tokens``; 0 when it is not worth it or too late."""
        if turn.load is not Load.READY:
            return 0
        turn.local_blocks = local_tokens // self._block_size
        tokens = (turn.verified - turn.local_blocks) * self._block_size
        if tokens < max(1, self._settings.kv_recompute_threshold):
            self.give_up(turn, turn.reason or "fewer tokens than the recompute threshold to read")
            return 0
        if self._clock() >= turn.deadline:
            self.give_up(turn, "the ticket ran out before the read")
            return 0
        return tokens

    def give_up(self, turn: Turn, reason: str) -> None:
        """No read: the holder is told, the rest is computed."""
        turn.reason = reason
        turn.load = Load.OVER
        self.done(turn)

    def done(self, turn: Turn) -> None:
        """The ticket is over, whatever came of it."""
        if turn.ticket_id:
            self._link.done(turn.ticket_id, turn.directive.lease.engine)
            turn.ticket_id = ""

    def _usable(self, hashes: Sequence[bytes], prompt_tokens: int) -> Sequence[bytes]:
        """Whole blocks of the prompt, never all of it: the last token is computed to sample from."""
        return hashes[: max(0, prompt_tokens - 1) // self._block_size]

    def _take(self, turn: Turn, response: pb.TicketResponse, usable: Sequence[bytes]) -> None:
        turn.answer = None
        if response.refusal:
            self.give_up(turn, f"ticket refused: {wire.refusal_words(response.refusal)}")
            return
        verified = common_blocks(usable, response.block_hashes)
        if problem := self._problem(response, verified):
            self.give_up(turn, problem)
            return
        turn.ticket, turn.verified, turn.load = response, verified, Load.READY
        margin = nanoseconds(self._settings.kvtide_ticket_margin)
        turn.deadline = reader_deadline(turn.asked_at, wire.nanoseconds(response.duration), margin)

    def _problem(self, response: pb.TicketResponse, verified: int) -> str:
        if response.holder.pairing_digest != self._pairing_digest:
            return "the holder runs other weights or another configuration"
        if len(response.block_ids) != len(response.block_hashes):
            return "malformed ticket"
        return "" if verified else "the history differs from what is held"
