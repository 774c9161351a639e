"""More conversations than D has blocks for: holds give way, and nobody waits for a TTL."""

import time

import pytest

from tests.e2e.world import Counters, World, long_question, wait_until

pytestmark = pytest.mark.engine
CONVERSATIONS = 30
BOUND = 8.0
"""Seconds; a hold's TTL is 120, a prefill's lease 10."""


def test_holds_give_way_to_thirty_conversations_in_a_row(world: World) -> None:
    counters = Counters(world.decode)
    for number in range(CONVERSATIONS):
        asked = [long_question(number)]
        started = time.monotonic()
        answer = world.ask(f"pressure-{number}", asked, max_tokens=4)
        assert time.monotonic() - started < BOUND, number
        assert 550 < len(answer.prompt) < 650
        if number % 10 == 9:
            world.check(answer, asked, max_tokens=4)
    assert counters.wait("kvtide:leases_granted_total", CONVERSATIONS) == CONVERSATIONS
    wait_until(lambda: counters.of("kvtide:leases_evicted_total") > 0, 5, "holds were evicted")
    assert counters.of("vllm:num_preemptions_total") == 0
