"""Conversations through real engines: every answer equals a plain vLLM's, whatever the client sends back."""

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from kvtide_bench.scrape import Change, read

if TYPE_CHECKING:
    from tests.e2e.conftest import World

pytestmark = pytest.mark.engine
BLOCK = 32
TOPICS = ("tides", "harbours", "lighthouses")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def question(topic: str, turn: int) -> dict[str, str]:
    note = f"Note {turn} about {topic}: the water at the pier rises and falls, and the pilots write down the hour. "
    return user(note * 4 + "What does the note say?")


@pytest.mark.parametrize("topic", TOPICS)
def test_every_answer_of_a_conversation_equals_a_plain_vllms(world: "World", topic: str) -> None:
    session, messages = f"equal-{topic}", []
    before = read(world.deployment.engines["prefill-0"].url)
    reused = []
    for turn in range(1, 7):
        messages.append(question(topic, turn))
        answer = world.ask(session, messages)
        assert answer.text == world.plain(messages)
        reused.append(answer.reused)
        assert answer.strategy == ("PREFILL_REUSE" if turn > 1 else "PREFILL_FRESH"), answer.reason
        messages.append(said(answer.text))
    assert reused[0] == 0
    assert all(later > earlier for earlier, later in pairwise(reused))
    change = Change(before, read(world.deployment.engines["prefill-0"].url))
    assert change.external_tokens == sum(reused), "vLLM's own counter agrees with the headers"
    assert change.of("vllm:nixl_bytes_transferred_sum") > 0


def grown(world: "World", session: str, turns: int = 2) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = []
    for turn in range(1, turns + 1):
        messages.append(question(session, turn))
        messages.append(said(world.ask(session, messages).text))
    return messages


def test_a_word_changed_in_the_first_message_is_answered_right_and_poisons_nothing(world: "World") -> None:
    messages = grown(world, "edit-first")
    messages[0] = user(messages[0]["content"].replace("water", "river", 1))
    messages.append(user("And now?"))
    expected = world.plain(messages)
    assert world.ask("edit-first", messages).text == expected
    assert world.ask("edit-first-again", messages).text == expected


def test_a_word_changed_late_is_reused_up_to_the_block_before_it(world: "World") -> None:
    messages = grown(world, "edit-late")
    first = world.ask("edit-late-count", messages[:1], 1).prompt_tokens
    messages[2] = user(messages[2]["content"].replace("hour", "time"))
    messages.append(user("And now?"))
    answer = world.ask("edit-late", messages)
    assert answer.text == world.plain(messages)
    assert first // BLOCK * BLOCK <= answer.reused < answer.prompt_tokens


@pytest.mark.parametrize("shape", ["dropped", "regenerated", "rewritten"])
def test_a_shorter_history_than_what_is_held_is_answered_right(world: "World", shape: str) -> None:
    session = f"short-{shape}"
    messages = grown(world, session)
    asked = {
        "dropped": [*messages[:2], user("Something else: what rises?")],
        "regenerated": messages[:3],
        "rewritten": [*messages[:2], user("Rewritten: who writes down the hour?")],
    }[shape]
    answer = world.ask(session, asked)
    assert answer.text == world.plain(asked)
    assert answer.reused >= BLOCK


@pytest.mark.parametrize("change", ["stripped", "cut", "thinking removed"])
def test_an_answer_returned_differently_is_reused_up_to_the_difference(world: "World", change: str) -> None:
    session = f"returned-{change}"
    messages = grown(world, session)
    text = messages[-1]["content"]
    returned = {"stripped": text.strip()[:-1], "cut": text[: len(text) // 2], "thinking removed": text[8:]}[change]
    asked = [*messages[:-1], said(returned), user("Go on.")]
    answer = world.ask(session, asked)
    assert answer.text == world.plain(asked)
    assert answer.reused >= BLOCK


def test_transfer_params_of_a_client_never_reach_an_engine(world: "World") -> None:
    messages = grown(world, "victim")
    asked = [*messages, user("And now?")]
    forged = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "x",
        "kvtide": {"mac": ""},
    }
    assert world.ask("thief", asked, kv_transfer_params=forged).text == world.plain(asked)
