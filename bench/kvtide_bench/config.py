"""Settings of the demo and of a local deployment."""

from dataclasses import dataclass
from pathlib import Path

from kvtide.cli.settings import setting
from kvtide_bench.local.deployment import ROOT


@dataclass(frozen=True)
class UpSettings:
    """``kvtide up``."""

    gateway_port: int = setting(8000, "Port that the deployment serves on.")
    run_dir: str = setting(str(ROOT / ".cache" / "run"), "Directory for logs.")
    dtype: str = setting("bfloat16", "Weights and KV: bfloat16 or float32.")
    force_strategy: str = setting("PREFILL_REUSE", "Strategy of every request; empty: routing decides.")

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError("dtype must be bfloat16 or float32")


@dataclass(frozen=True)
class DemoSettings:
    """``kvtide demo``."""

    results: str = setting(str(ROOT / ".cache" / "demo"), "Directory for the charts, the JSON and the logs.")
    dtype: str = setting("bfloat16", "Weights and KV: bfloat16 or float32.")
    turns: int = setting(7, "Turns of the conversation, at least 2.")
    answer_tokens: int = setting(48, "Tokens of each answer.")
    part_chars: int = setting(3600, "Characters of the text that each turn adds.")
    prefill_prefix_cache: bool = setting(False, "P's own prefix cache; the study had it off in both legs.")

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError("dtype must be bfloat16 or float32")
        if self.turns < 2 or self.answer_tokens < 1 or self.part_chars < 1:
            raise ValueError("turns must be at least 2, answer_tokens and part_chars at least 1")

    @property
    def directory(self) -> Path:
        return Path(self.results)
