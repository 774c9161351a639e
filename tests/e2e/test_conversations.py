"""Conversations through real engines: every answer equals a plain vLLM's, and D's blocks are really read."""

from itertools import product

import pytest

from tests.e2e.world import BLOCK, Answer, Counters, World, aside, question, reusable, said, user, wait_until

pytestmark = pytest.mark.engine
TOPICS = ("tides", "harbours", "lighthouses", "pilots", "buoys", "currents", "anchors", "ferries", "storms")
TURNS = 6
KV_BYTES = 30 * 2 * 3 * 64 * 4
"""Of one token: layers, K and V, heads, their size, float32."""


@pytest.mark.parametrize("topic", TOPICS)
def test_every_answer_of_a_conversation_equals_a_plain_vllms(world: World, topic: str) -> None:
    session, messages, last = f"equal-{topic}", [], None
    for turn in range(1, TURNS + 1):
        messages.append(question(topic, turn))
        counters = Counters(world.prefill)
        answer = world.ask_right(session, messages)
        assert answer.strategy == ("PREFILL_REUSE" if last else "PREFILL_FRESH"), answer.reason
        read_back(counters, answer, last)
        messages.append(said(answer.text))
        last = answer


def read_back(counters: Counters, answer: Answer, last: Answer | None) -> None:
    """vLLM's own counters on P say the same as the headers, and both what must be."""
    expected = reusable(answer.prompt, last) if last else 0
    assert answer.reused == expected, answer.reason
    assert (expected > 0) == (last is not None)
    wait_until(lambda: counters.of("vllm:prompt_tokens_total") >= len(answer.prompt), 5, "P counted the prompt")
    assert counters.change().external_tokens == expected
    if expected:
        assert counters.wait("vllm:nixl_bytes_transferred_sum") == expected * KV_BYTES


def test_a_turn_whose_last_token_fills_a_block_is_reused_up_to_the_block_before(world: World) -> None:
    session, messages, first = filled(world)
    whole = len(first.prompt) + len(first.tokens)
    assert whole % BLOCK == 0
    messages = [*messages, said(first.text), question("the next one", 2)]
    answer = world.ask_right(session, messages)
    assert answer.prompt[:whole] == [*first.prompt, *first.tokens], "the next prompt contains the filled block"
    assert answer.reused == whole - BLOCK, "the last sampled token has no KV"


def filled(world: World) -> tuple[str, list[dict[str, str]], Answer]:
    """A first turn that ends with a block, and whose answer is tokenised again as it was sampled."""
    for number, words in product(range(5), (4, 5, 6)):
        messages = [user(f"Ship {number} waits. " + "It waits for the tide at the pier. " * words * 2 + "Why?")]
        tokens = -len(world.tokens(messages)) % BLOCK
        if not 4 <= tokens <= 16:
            continue
        session = f"filled-{number}-{words}"
        answer = world.ask_right(session, messages, max_tokens=tokens, ignore_eos=True)
        again = world.tokens([*messages, said(answer.text)], add_generation_prompt=False)
        if again[: len(answer.prompt) + tokens] == [*answer.prompt, *answer.tokens]:
            return session, messages, answer
    raise AssertionError("no conversation of this kind")


def test_two_turns_of_one_conversation_at_once_are_both_right(world: World) -> None:
    messages, last = world.grown("at-once")
    asked = [[*messages, user("Who writes?")], [*messages, user("What rises?")], [*messages, user("What rises?")]]
    running = [aside(lambda m=m: world.ask("at-once", m)) for m in asked]
    for future, own in zip(running, asked, strict=True):
        answer = future.result(60)
        world.check(answer, own)
        assert answer.reused in (0, reusable(answer.prompt, last))
    again = [*asked[0], said(running[0].result().text), user("And then?")]
    answer = world.ask_right("at-once", again)
    assert answer.reused >= reusable(answer.prompt, last) > 0
