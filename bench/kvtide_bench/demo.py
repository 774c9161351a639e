"""The main job: one conversation with reuse off, then on, on real engines, and what came of it."""

import json
import platform
import statistics
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvtide_bench.charts import prefill_chart, ttft_chart
from kvtide_bench.config import DemoSettings
from kvtide_bench.conversation import Conversation, Message, Turn, parts
from kvtide_bench.local import Deployment, EngineSpec, LocalSettings

AIM_RATIO, AIM_CONTROL_MS = 5.0, 15.0


def run(settings: DemoSettings) -> None:
    """Raises NotReady when a part does not start."""
    directory = settings.directory
    cache = () if settings.prefill_prefix_cache else ("--no-enable-prefix-caching",)
    engines = (EngineSpec("prefill-0", "prefill", cache), EngineSpec("decode-0", "decode"))
    local = LocalSettings(directory / "logs", engines, settings.dtype, say=click.echo)
    with Deployment(local) as deployment:
        off, on = converse(deployment, settings)
    report(off, on, settings)


def converse(deployment: Deployment, settings: DemoSettings) -> tuple[list[Turn], list[Turn]]:
    """Both legs. The second gets the first one's answers as its history, so that their prompts are the same."""
    say(deployment, "PREFILL_FRESH").say(0, [user("Say hello. " * 40)], 4)  # pays for first contact
    histories = grow(settings)
    click.echo("Reuse off:")
    off, answers = leg(say(deployment, "PREFILL_FRESH"), histories, [], settings)
    click.echo("Reuse on:")
    on, _ = leg(say(deployment, "PREFILL_REUSE"), histories, answers, settings)
    return off, on


def say(deployment: Deployment, strategy: str) -> Conversation:
    """A new conversation under a forced strategy."""
    prefill, decode = (deployment.engines[name].url for name in ("prefill-0", "decode-0"))
    return Conversation(deployment.url, f"demo-{uuid.uuid4().hex[:8]}", strategy, prefill, decode)


def user(text: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}


def grow(settings: DemoSettings) -> list[Message]:
    """What the user says, turn by turn."""
    pieces = parts(settings.turns, settings.part_chars)
    return [user(f"Part {i} of a text:\n\n{piece}\n\nWhat is this part about?") for i, piece in enumerate(pieces, 1)]


def leg(
    conversation: Conversation, questions: Sequence[Message], answers: Sequence[str], settings: DemoSettings
) -> tuple[list[Turn], list[str]]:
    """The turns and their answers; the history holds ``answers`` where given, else the conversation's own."""
    messages: list[Message] = []
    turns: list[Turn] = []
    for number, question in enumerate(questions, 1):
        messages.append(question)
        turn = conversation.say(number, messages, settings.answer_tokens)
        turns.append(turn)
        click.echo(f"  turn {number}: {turn.prompt_tokens} prompt tokens, TTFT {turn.ttft * 1e3:,.0f} ms")
        said = answers[number - 1] if answers else turn.answer
        messages.append({"role": "assistant", "content": said})
    return turns, [turn.answer for turn in turns]


def report(off: Sequence[Turn], on: Sequence[Turn], settings: DemoSettings) -> None:
    """Prints the table, writes the charts and the JSON."""
    click.echo("\n" + table(off, on))
    directory = settings.directory
    ttft_chart(off, on, directory / "ttft.png")
    prefill_chart(off, on, directory / "prefill.png")
    facts = summary(off, on, settings)
    (directory / "demo.json").write_text(json.dumps(facts, indent=1) + "\n")
    click.echo(f"\nTTFT off / on at the last turn: {facts['ratio_last_turn']:.1f} (aim: at least {AIM_RATIO:.0f})")
    share = facts["control_plane_ms_median"]
    click.echo(
        f"Control plane's share of a reuse turn's TTFT: median {share:.1f} ms (aim: at most {AIM_CONTROL_MS:.0f})"
    )
    same = "equal in both legs" if facts["answers_equal"] else "not all equal (bfloat16 flips near ties now and then)"
    click.echo(f"Answers: {same}")
    for name in ("ttft.png", "prefill.png", "demo.json"):
        click.echo(f"Wrote {directory / name}")


def table(off: Sequence[Turn], on: Sequence[Turn]) -> str:
    """One line a turn."""
    head = (
        f"{'turn':>4} {'prompt':>7} {'strategy':<14} {'reused':>7} {'TTFT off':>10} {'TTFT on':>10} {'ratio':>6}  why"
    )
    lines = [head]
    for a, b in zip(off, on, strict=True):
        times = f"{a.ttft * 1e3:>7,.0f} ms {b.ttft * 1e3:>7,.0f} ms {a.ttft / b.ttft:>6.1f}"
        lines.append(f"{b.number:>4} {b.prompt_tokens:>7,} {b.strategy:<14} {b.reused_tokens:>7,} {times}  {b.reason}")
    return "\n".join(lines)


def summary(off: Sequence[Turn], on: Sequence[Turn], settings: DemoSettings) -> dict[str, Any]:
    """Every number, and where it was measured."""
    reused = [turn for turn in on if turn.reused_tokens]
    return {
        "machine": {"platform": platform.platform(), "cpu": cpu(), "python": platform.python_version()},
        "settings": asdict(settings),
        "ratio_last_turn": off[-1].ttft / on[-1].ttft,
        "control_plane_ms_median": statistics.median([t.control_plane * 1e3 for t in reused]) if reused else 0.0,
        "reuse_turns": len(reused),
        "answers_equal": [t.answer for t in off] == [t.answer for t in on],
        "off": [turn.row() for turn in off],
        "on": [turn.row() for turn in on],
    }


def cpu() -> str:
    """The processor's name and the number of cores, from /proc."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(names)} cores"
