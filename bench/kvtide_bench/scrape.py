"""Counters of a vLLM engine, and what changed between two readings."""

import re
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{[^}]*\})? (\S+)$")
_ENDED = "vllm:e2e_request_latency_seconds_count"
Reading = Mapping[str, float]


def read(url: str) -> Reading:
    """Every sample of an engine's /metrics, labels but ``source`` and ``reason`` summed up. Raises OSError."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            source = re.search(r'(?:source|reason)="([^"]*)"', match[2] or "")
            name = f"{match[1]}[{source[1]}]" if source else match[1]
            found[name] = found.get(name, 0.0) + float(match[3])
    return found


def settled(url: str, before: Reading, timeout: float = 5.0) -> Reading:
    """A reading in which a request that ended after ``before`` is counted; the last one after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        now = read(url)
        ended = now.get(_ENDED, 0.0) > before.get(_ENDED, 0.0)
        if ended or time.monotonic() > deadline:
            return now
        time.sleep(0.05)


@dataclass(frozen=True)
class Change:
    """What an engine did between two readings."""

    before: Reading
    after: Reading

    def of(self, name: str) -> float:
        """The change of one counter."""
        return self.after.get(name, 0.0) - self.before.get(name, 0.0)

    @property
    def ttft(self) -> float:
        """Seconds from an engine's receipt of its requests to their first tokens."""
        return self.of("vllm:time_to_first_token_seconds_sum")

    @property
    def transfer(self) -> float:
        """Seconds of NIXL reads."""
        return self.of("vllm:nixl_xfer_time_seconds_sum")

    @property
    def asked(self) -> float:
        """Seconds that requests waited for tickets."""
        return self.of("kvtide:ask_microseconds_total") / 1e6

    @property
    def external_tokens(self) -> int:
        """Prompt tokens whose KV came from another engine."""
        return int(self.of("vllm:prompt_tokens_by_source_total[external_kv_transfer]"))
