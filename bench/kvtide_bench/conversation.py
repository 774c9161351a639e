"""One conversation through the gateway, streamed with the OpenAI SDK and timed."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from kvtide_bench.local.engines import SERVED_NAME
from kvtide_bench.scrape import Change, read, settled

Message = ChatCompletionMessageParam


@dataclass(frozen=True)
class Turn:
    """What one turn took, in seconds: ``ttft`` by the client's clock, the rest by the engines' own counters.

    ``prefill_ttft`` and ``decode_ttft`` are vLLM's time_to_first_token_seconds on P and D, ``transfer`` is the time of
    P's NIXL reads, ``asked`` the time that P's connector waited for a ticket. ``reused_tokens`` is what the response
    header says, ``read_tokens`` what P counted as loaded from another engine.
    """

    number: int
    prompt_tokens: int
    strategy: str
    reason: str
    reused_tokens: int
    read_tokens: int
    ttft: float
    prefill_ttft: float
    decode_ttft: float
    transfer: float
    asked: float
    answer: str

    @property
    def compute(self) -> float:
        """P's time to first token without the ticket and the transfer."""
        return max(0.0, self.prefill_ttft - self.asked - self.transfer)

    @property
    def control_plane(self) -> float:
        """The client's TTFT less P's prefill and D's TTFT; asking for a ticket counts as control plane."""
        return self.ttft - (self.prefill_ttft - self.asked) - self.decode_ttft

    def row(self) -> dict[str, Any]:
        """Everything, for the JSON."""
        return {**asdict(self), "compute": self.compute, "control_plane": self.control_plane}


class Conversation:
    """Keeps no history of its own: both legs of a comparison are given the same one."""

    def __init__(self, client: OpenAI, strategy: str, prefill_url: str, decode_url: str) -> None:
        """A fresh conversation id, under a forced strategy; the engines' URLs are for their counters."""
        self._client = client
        self._id = f"demo-{uuid.uuid4().hex[:12]}"
        self._strategy = strategy
        self._engines = (prefill_url, decode_url)

    def say(self, number: int, messages: Sequence[Message], answer_tokens: int) -> Turn:
        """One streamed turn. Raises openai.OpenAIError, OSError when an engine's counters cannot be read."""
        before = [read(url) for url in self._engines]
        ttft, text, tokens, headers = self._stream(messages, answer_tokens)
        prefill, decode = (Change(b, settled(url, b)) for b, url in zip(before, self._engines, strict=True))
        return Turn(
            number=number,
            prompt_tokens=tokens,
            strategy=headers["x-kvtide-strategy"],
            reason=headers["x-kvtide-reason"],
            reused_tokens=int(headers["x-kvtide-reused-tokens"]),
            read_tokens=prefill.external_tokens,
            ttft=ttft,
            prefill_ttft=prefill.ttft,
            decode_ttft=decode.ttft,
            transfer=prefill.transfer,
            asked=prefill.asked,
            answer=text,
        )

    def _stream(self, messages: Sequence[Message], answer_tokens: int) -> tuple[float, str, int, Any]:
        started = time.perf_counter()
        raw = self._client.chat.completions.with_raw_response.create(
            model=SERVED_NAME,
            messages=list(messages),
            temperature=0,
            max_tokens=answer_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"conversation_id": self._id},
            extra_headers={"X-Kvtide-Strategy": self._strategy},
        )
        ttft, text, tokens = 0.0, "", 0
        for chunk in raw.parse():
            if chunk.choices and chunk.choices[0].delta.content:
                ttft = ttft or time.perf_counter() - started
                text += chunk.choices[0].delta.content
            tokens = chunk.usage.prompt_tokens if chunk.usage else tokens
        return ttft, text, tokens, raw.headers
