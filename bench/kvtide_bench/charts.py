"""The two charts of the published study."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from kvtide_bench.conversation import Turn


def ttft_chart(off: Sequence[Turn], on: Sequence[Turn], path: Path) -> None:
    """TTFT against prompt length, reuse off and on."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for turns, label, color in ((off, "recompute", "#b0413e"), (on, "D→P reuse", "#2a6f97")):
        lengths, seconds = [t.prompt_tokens for t in turns], [t.ttft for t in turns]
        axes.plot(lengths, seconds, marker="o", label=label, color=color)
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("time to first token (s)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title("Time to first token while the conversation grows")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def prefill_chart(off: Sequence[Turn], on: Sequence[Turn], path: Path) -> None:
    """Prefill time as stacked bars, compute and KV transfer, for each turn off and on."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for turns, shift, color, name in ((off, -0.2, "#b0413e", "recompute"), (on, 0.2, "#2a6f97", "reuse")):
        places = [t.number + shift for t in turns]
        compute, transfer = [t.compute for t in turns], [t.transfer for t in turns]
        axes.bar(places, compute, 0.38, color=color, label=f"compute, {name}")
        axes.bar(places, transfer, 0.38, bottom=compute, color="#e9c46a", label="KV transfer" if shift > 0 else None)
    axes.set_xticks([t.number for t in on], [f"{t.number}\n{t.prompt_tokens}" for t in on])
    axes.set_xlabel("turn, prompt tokens")
    axes.set_ylabel("prefill time (s)")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    axes.set_title("Prefill time on P")
    figure.savefig(path, dpi=130)
    plt.close(figure)
