"""What came of the two legs: the table, the summary and the files."""

import json
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from kvtide_bench.charts import prefill_chart, ttft_chart
from kvtide_bench.config import DemoSettings
from kvtide_bench.conversation import Turn
from kvtide_bench.machine import cpu, memory_gib

AIM_RATIO, AIM_CONTROL_PLANE_MS = 5.0, 15.0


def table(off: Sequence[Turn], on: Sequence[Turn]) -> str:
    """One line a turn."""
    columns = "turn", "prompt", "strategy", "reused", "TTFT off", "TTFT on", "ratio"
    head = "{:>4} {:>7}  {:<13} {:>7} {:>11} {:>11} {:>6}  why".format(*columns)
    return "\n".join([head, *map(_line, off, on)])


def _line(off: Turn, on: Turn) -> str:
    times = f"{off.ttft * 1e3:>8,.0f} ms {on.ttft * 1e3:>8,.0f} ms {off.ttft / on.ttft:>6.1f}"
    return f"{on.number:>4} {on.prompt_tokens:>7,}  {on.strategy:<13} {on.reused_tokens:>7,} {times}  {on.reason}"


def control_plane_ms(turns: Sequence[Turn]) -> float:
    """The median over the turns that reused something, in milliseconds; NaN when none did."""
    shares = [turn.control_plane * 1e3 for turn in turns if turn.reused_tokens]
    return statistics.median(shares) if shares else float("nan")


def _met(aim: bool) -> str:
    return "met" if aim else "missed"


def strays(turns: Sequence[Turn], strategy: str) -> list[int]:
    """Numbers of the turns that ran by another strategy, for instance because a leg took too long."""
    return [turn.number for turn in turns if turn.strategy != strategy]


def summary(
    off: Sequence[Turn], on: Sequence[Turn], settings: DemoSettings, engine: Mapping[str, str]
) -> dict[str, Any]:
    """Every number, and where and how it was measured; ``engine`` names the versions of the engine environment."""
    return {
        "command": shlex.join(sys.argv),
        "machine": {"platform": platform.platform(), "cpu": cpu(), "memory_gib": memory_gib()},
        "versions": {"python": platform.python_version(), "kvtide": version("kvtide"), **engine},
        "settings": asdict(settings),
        "ratio_last_turn": off[-1].ttft / on[-1].ttft,
        "control_plane_ms_median": control_plane_ms(on),
        "answers_equal": sum(a.answer == b.answer for a, b in zip(off, on, strict=True)),
        "strays": {"off": strays(off, "PREFILL_FRESH"), "on": strays(on[1:], "PREFILL_REUSE")},
        "off": [turn.row() for turn in off],
        "on": [turn.row() for turn in on],
    }


def verdict(facts: Mapping[str, Any]) -> str:
    """The two numbers that the demo is about, and whether the answers agreed."""
    turns = len(facts["on"])
    others = [f"{leg} {n}" for leg in ("off", "on") for n in facts["strays"][leg]]
    ratio, share = facts["ratio_last_turn"], facts["control_plane_ms_median"]
    return (
        f"TTFT off / on at the last turn: {ratio:.2f} (aim: at least {AIM_RATIO:.0f}, {_met(ratio >= AIM_RATIO)})\n"
        f"Control plane's share of a reuse turn's TTFT: median {share:.1f} ms"
        f" (aim: at most {AIM_CONTROL_PLANE_MS:.0f} ms, {_met(share <= AIM_CONTROL_PLANE_MS)})\n"
        f"Answers equal in both legs: {facts['answers_equal']} of {turns}"
        " (bfloat16 flips near ties now and then)"
        + (f"\nTurns that did not run as asked (is the machine busy?): {', '.join(others)}" if others else "")
    )


def write(
    off: Sequence[Turn], on: Sequence[Turn], facts: Mapping[str, Any], settings: DemoSettings, say: Callable[[str], Any]
) -> None:
    """The charts and the JSON."""
    directory = settings.directory
    ttft_chart(off, on, directory / "ttft.png")
    prefill_chart(off, on, directory / "prefill.png")
    (directory / "demo.json").write_text(json.dumps(facts, indent=1) + "\n")
    for name in ("ttft.png", "prefill.png", "demo.json"):
        say(f"Wrote {directory / name}")
