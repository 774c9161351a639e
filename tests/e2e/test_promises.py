"""Engines that stop for longer than a promise lasts, legs that disagree: right answers, and nothing false is read."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.world import (
    Answer,
    Counters,
    Message,
    World,
    aside,
    long_question,
    reusable,
    said,
    user,
    wait_until,
)

pytestmark = pytest.mark.engine
LONGEST = 2040
"""Tokens that P's pool just takes."""


@contextlib.contextmanager
def paused(process: Any) -> Iterator[None]:
    """-STOP, and -CONT whatever happens."""
    process.pause()
    try:
        yield
    finally:
        process.resume()


def test_a_prefill_engine_stopped_beyond_its_ticket_does_not_use_what_it_reads(world: World) -> None:
    messages, _ = world.grown("late-prefill", 3)
    asked = [*messages, user("And now?")]
    prefill = Counters(world.prefill)
    (world.gate / "closed").touch()
    running = aside(lambda: world.ask("late-prefill", asked))
    try:
        wait_until((world.gate / "reached").exists, 10, "P has its ticket and is about to read")
        with paused(world.prefill.process):
            overwrite_decode(world)
            (world.gate / "closed").unlink()
    finally:
        (world.gate / "closed").unlink(missing_ok=True)
        (world.gate / "reached").unlink(missing_ok=True)
    answer = running.result(60)
    world.check(answer, asked)
    wait_until(lambda: late(prefill) == 1, 5, "P counts the load as late")
    assert answer.reused == 0
    assert prefill.of("kvtide:loads_done_total") == 0
    goes_on(world, "late-prefill", asked, answer)


def late(prefill: Counters) -> float:
    return prefill.of("kvtide:loads_late_total") + prefill.of("kvtide:loads_hung_total")


def overwrite_decode(world: World) -> None:
    """Requests that need more than D's pool, until no hold is left, which takes until the ticket is over.

    After test_pressure D still has some of these prompts' blocks, which saves computing them.
    """
    gone = threading.Event()

    def fill(number: int) -> None:
        while not gone.is_set():
            body = world.body([long_question(number)], max_tokens=40, ignore_eos=True)
            assert world.post(world.decode.url, body).status_code == 200

    filling = [aside(lambda n=number: fill(n)) for number in range(17, 30)]
    try:
        wait_until(lambda: world.held_tokens(world.decode) == 0, 60, "D's holds gave way")
    finally:
        gone.set()
    for future in filling:
        future.result(60)


def test_a_decode_engine_stopped_beyond_the_prefills_lease_does_not_read_reused_blocks(world: World) -> None:
    messages, _ = world.grown("late-decode", 3)
    asked = [*messages, user("And now?")]
    decode, prefill = Counters(world.decode), Counters(world.prefill)

    def overwrite(body: dict[str, Any]) -> dict[str, Any]:
        """A prompt that takes all of P's pool: it is answered only when the lease of the blocks for D is over."""
        with paused(world.decode.process):
            world.fill(world.prefill, LONGEST)
        return body

    world.to_decode.on_next(overwrite)
    answer = world.ask(session="late-decode", messages=asked)
    world.check(answer, asked)
    assert prefill.of("vllm:prompt_tokens_total") >= LONGEST, "the hook was there"
    assert decode.wait("kvtide:prefill_late_total") == 1
    assert decode.of("kvtide:loads_done_total") == 0
    goes_on(world, "late-decode", asked, answer)


def goes_on(world: World, session: str, asked: list[Message], answer: Answer) -> None:
    """The engine is attached again, and the next turn reuses."""
    world.deployment.wait_attached()
    world.reuses_within(5, session, [*asked, said(answer.text), user("And then?")])


Change = Callable[[list[Message]], list[Message]]


def first_word(messages: list[Message]) -> list[Message]:
    return [user(messages[0]["content"].replace("water", "river", 1)), *messages[1:]]


def last_word(messages: list[Message]) -> list[Message]:
    return [*messages[:-1], user(messages[-1]["content"].replace("sinks", "rises"))]


def longer(messages: list[Message]) -> list[Message]:
    return [*messages, said("It rises."), user("Are you sure?")]


@pytest.mark.parametrize("change", [first_word, last_word, longer])
def test_legs_with_different_prompts_are_noticed_and_survived(world: World, change: Change) -> None:
    session = f"differs-{change.__name__}"
    messages, last = world.grown(session)
    asked = [*messages, user("Say in a few words what sinks")]
    changed = change(asked)
    assert changed != asked
    counters = Counters(world.decode)
    world.to_decode.on_next(lambda body: body | {"messages": changed})
    answer = world.ask(session, asked)
    world.check(answer, changed)
    assert counters.wait("kvtide:prefill_mismatch_total") == 1
    assert counters.of("kvtide:loads_done_total") == 0
    later = world.ask_right(session, asked)
    assert later.reused == reusable(later.prompt, last, answer) > 0
    assert world.decode.process.running
