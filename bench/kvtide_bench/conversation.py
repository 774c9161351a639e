"""One conversation through the gateway, streamed with the OpenAI SDK and timed."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI

from kvtide_bench.local.deployment import ROOT
from kvtide_bench.local.engines import SERVED_NAME
from kvtide_bench.scrape import Change, read

TEXTS = ("docs/architecture.md", "LICENSE", "protos/kvtide/lease/v1/lease.proto")
Message = dict[str, str]


@dataclass(frozen=True)
class Turn:
    """What one turn took; times in seconds."""

    number: int
    prompt_tokens: int
    strategy: str
    reason: str
    reused_tokens: int
    ttft: float
    prefill_ttft: float
    decode_ttft: float
    transfer: float
    asked: float
    answer: str

    @property
    def compute(self) -> float:
        """P's prefill without the ticket and the transfer."""
        return max(0.0, self.prefill_ttft - self.asked - self.transfer)

    @property
    def control_plane(self) -> float:
        """The client's TTFT less P's prefill and D's TTFT; asking for a ticket counts as control plane."""
        return self.ttft - (self.prefill_ttft - self.asked) - self.decode_ttft

    def row(self) -> dict[str, Any]:
        """Everything, for the JSON."""
        return {**asdict(self), "compute": self.compute, "control_plane": self.control_plane}


def parts(count: int, characters: int, root: Path = ROOT) -> list[str]:
    """Pieces of texts that ship with the project. Raises ValueError when they are too short."""
    text = "\n\n".join((root / name).read_text() for name in TEXTS)
    if len(text) < count * characters:
        raise ValueError(f"the texts have {len(text)} characters, {count * characters} are needed")
    return [text[i * characters : (i + 1) * characters] for i in range(count)]


class Conversation:
    """Keeps no history of its own: both legs of a comparison are given the same one."""

    def __init__(self, url: str, session_id: str, strategy: str, prefill_url: str, decode_url: str) -> None:
        self._client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=300)
        self._session_id = session_id
        self._strategy = strategy
        self._engines = (prefill_url, decode_url)

    def say(self, number: int, messages: Sequence[Message], answer_tokens: int) -> Turn:
        """One streamed turn."""
        before = [read(url) for url in self._engines]
        ttft, text, tokens, headers = self._stream(messages, answer_tokens)
        time.sleep(0.3)  # the engines' counters follow their answers
        prefill, decode = (Change(b, read(url)) for b, url in zip(before, self._engines, strict=True))
        return Turn(
            number=number,
            prompt_tokens=tokens,
            strategy=headers["x-kvtide-strategy"],
            reason=headers["x-kvtide-reason"],
            reused_tokens=int(headers["x-kvtide-reused-tokens"]),
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
            messages=list(messages),  # type: ignore[arg-type]  # plain dicts are what the SDK sends anyway
            temperature=0,
            max_tokens=answer_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"conversation_id": self._session_id},
            extra_headers={"X-Kvtide-Strategy": self._strategy} if self._strategy else {},
        )
        ttft, text, tokens = 0.0, "", 0
        for chunk in raw.parse():
            if chunk.choices and chunk.choices[0].delta.content:
                ttft = ttft or time.perf_counter() - started
                text += chunk.choices[0].delta.content
            tokens = chunk.usage.prompt_tokens if chunk.usage else tokens
        return ttft, text, tokens, raw.headers
