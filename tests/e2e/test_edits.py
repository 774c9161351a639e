"""Clients that send another history than D generated: right answers, and reuse up to the difference, to the block."""

import pytest

from tests.e2e.world import BLOCK, Answer, Message, World, common, question, reusable, said, user

pytestmark = pytest.mark.engine


def right_twice(world: World, session: str, messages: list[Message], *held: Answer) -> Answer:
    """Asks with reuse and again without it: poisoned blocks would show in the second answer."""
    answer = world.ask_right(session, messages)
    assert answer.reused == reusable(world.tokens(messages), *held), answer.reason
    again = world.ask_right(session, messages, headers={"x-kvtide-strategy": "DECODE_ONLY"})
    assert (again.strategy, again.reused) == ("DECODE_ONLY", 0)
    return answer


@pytest.mark.parametrize(("nth", "reuses"), [(1, False), (3, True)], ids=["early", "late"])
def test_a_word_changed_in_the_first_message_is_reused_up_to_the_block_before_it(
    world: World, nth: int, reuses: bool
) -> None:
    session = f"changed-{nth}"
    messages, last = world.grown(session)
    was = world.tokens(messages[:1])
    messages[0] = user(nth_replaced(messages[0]["content"], " water", " river", nth))
    now = world.tokens(messages[:1])
    assert len(now) == len(was) and now != was
    answer = right_twice(world, session, [*messages, user("And now?")], last)
    assert (answer.reused > 0) == reuses
    assert answer.reused <= common(was, now)


def nth_replaced(text: str, old: str, new: str, nth: int) -> str:
    parts = text.split(old)
    return old.join(parts[:nth]) + new + old.join(parts[nth:])


@pytest.mark.parametrize("shape", ["last exchange dropped", "answer regenerated", "message rewritten"])
def test_a_shorter_history_than_what_is_held_is_answered_right(world: World, shape: str) -> None:
    session = f"short-{shape}"
    messages, last = world.grown(session)
    asked = {
        "last exchange dropped": [*messages[:2], user("Something else: what rises?")],
        "answer regenerated": messages[:3],
        "message rewritten": [*messages[:2], user("Rewritten: who writes down the hour?")],
    }[shape]
    assert len(world.tokens(asked)) < len(last.held)
    assert right_twice(world, session, asked, last).reused > 0


def test_an_answer_whose_trailing_blank_the_client_strips_is_reused_up_to_it(world: World) -> None:
    session, messages = "stripped", [user(question("lists", 1)["content"] + " Then list five ships, one a line.")]
    tokens = until_blank(world.right(messages, max_tokens=48))
    answer = world.ask_right(session, messages, max_tokens=tokens)
    assert answer.text != answer.text.rstrip() != ""
    asked = [*messages, said(answer.text.rstrip()), user("Go on.")]
    assert right_twice(world, session, asked, answer).reused > 0


def until_blank(answer: Answer) -> int:
    """How many tokens to ask for to get an answer that ends with white space."""
    return next(i + 1 for i, piece in enumerate(answer.pieces) if i > 3 and piece != piece.rstrip())


def test_an_answer_that_the_client_cuts_is_reused_up_to_the_cut(world: World) -> None:
    session, messages = "cut", [question("cut", 1)]
    answer = world.ask_right(session, messages, max_tokens=16)
    asked = [*messages, said(answer.text[: len(answer.text) // 2]), user("Go on.")]
    assert right_twice(world, session, asked, answer).reused > len(answer.prompt) // BLOCK * BLOCK - BLOCK


def test_a_thinking_part_that_the_template_removes_is_not_reused(world: World) -> None:
    session, words = "thinking", "The pilots ask about the hour of high water, so the note must say when it rises. "
    begun = [question(session, 1), said(f"<think>{words * 3}</think>The note says")]
    unfinished = {"add_generation_prompt": False, "continue_final_message": True}
    first = world.ask_right(session, begun, **unfinished)
    before = len(world.tokens(begun[:1]))
    assert len(first.prompt) > before + 40, "D holds the KV of the thinking part"
    answered = said(begun[1]["content"] + first.text)
    answer = right_twice(world, session, [begun[0], answered, user("Go on.")], first)
    assert 0 < answer.reused <= before + 2, "only what comes before the thinking part"
