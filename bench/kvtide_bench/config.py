"""Settings of the demo and of a local deployment, each an option and an environment variable."""

from dataclasses import dataclass
from pathlib import Path

from kvtide.cli.settings import setting
from kvtide_bench.local.deployment import ROOT

MODEL = Path("models") / "SmolLM2-135M-Instruct"
_CACHE = str(ROOT / ".cache")


@dataclass(frozen=True)
class UpSettings:
    """``kvtide up``."""

    cache_dir: str = setting(_CACHE, "Directory with the model; logs go there too.")
    run_dir: str = setting("", "Directory for logs; empty: run in the cache directory.")
    gateway_port: int = setting(8000, "Port that the deployment serves on.")
    dtype: str = setting("", "Weights and KV: bfloat16 or float32; empty: the one that this CPU computes faster.")
    force_strategy: str = setting("PREFILL_REUSE", "Strategy of every request; empty: routing decides.")

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)

    @property
    def directory(self) -> Path:
        """For logs."""
        return Path(self.run_dir or Path(self.cache_dir, "run")).absolute()

    @property
    def model(self) -> Path:
        """The model's checkpoint."""
        return Path(self.cache_dir).absolute() / MODEL


@dataclass(frozen=True)
class DemoSettings:
    """``kvtide demo``."""

    cache_dir: str = setting(_CACHE, "Directory with the model; results go there too.")
    results: str = setting("", "Directory for the charts, the JSON and the logs; empty: demo in the cache directory.")
    dtype: str = setting("", "Weights and KV: bfloat16 or float32; empty: the one that this CPU computes faster.")
    turns: int = setting(10, "Turns of the conversation, over which the text is spread; at least 2.")
    answer_tokens: int = setting(48, "Most tokens of each answer.")
    turn_timeout: float = setting(300.0, "Seconds that one turn may take.")
    prefill_prefix_cache: bool = setting(False, "P's own prefix cache; the study had it off in both legs.")

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)
        if self.turns < 2 or self.answer_tokens < 1 or self.turn_timeout <= 0:
            raise ValueError("turns must be at least 2, answer_tokens at least 1, turn_timeout above 0")

    @property
    def directory(self) -> Path:
        """For results."""
        return Path(self.results or Path(self.cache_dir, "demo")).absolute()

    @property
    def model(self) -> Path:
        """The model's checkpoint."""
        return Path(self.cache_dir).absolute() / MODEL


def _check_dtype(dtype: str) -> None:
    if dtype not in ("", "bfloat16", "float32"):
        raise ValueError("dtype must be bfloat16 or float32, or empty")
