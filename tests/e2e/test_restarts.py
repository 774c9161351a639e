"""Each part restarted between turns: the next turn is answered right, and within seconds turns reuse again."""

import pytest
import redis

from kvtide_bench.local.engines import Engine
from tests.e2e.world import Answer, Message, World, said, user

pytestmark = pytest.mark.engine
SOON = 5.0
START = 120.0


def next_turn(world: World, session: str, messages: list[Message]) -> Answer:
    """Asks one thing more, and adds the exchange to the conversation."""
    messages.append(user(f"What about {len(messages)}?"))
    answer = world.ask_right(session, messages)
    messages.append(said(answer.text))
    return answer


def restarted(engine: Engine) -> None:
    engine.start()
    engine.wait(START)


def test_a_restarted_prefill_engine_reads_what_decode_still_holds(world: World) -> None:
    messages, _ = world.grown("restart-prefill")
    world.prefill.process.kill()
    assert next_turn(world, "restart-prefill", messages).strategy == "DECODE_ONLY"
    restarted(world.prefill)
    world.reuses_within(SOON, "restart-prefill", [*messages, user("And now?")])


def test_a_restarted_decode_engine_recomputes_and_then_holds_again(world: World) -> None:
    messages, _ = world.grown("restart-decode")
    world.decode.process.kill()
    restarted(world.decode)
    assert next_turn(world, "restart-decode", messages).reused == 0
    world.reuses_within(SOON, "restart-decode", [*messages, user("And now?")])


def test_without_the_services_turns_are_answered_and_after_their_restart_reuse_again(world: World) -> None:
    messages, _ = world.grown("restart-services")
    world.deployment.services.kill()
    assert next_turn(world, "restart-services", messages).reused == 0
    world.deployment.services.start()
    world.deployment.wait_services()
    world.reuses_within(SOON, "restart-services", [*messages, user("And now?")])


def test_a_flushed_store_is_rebuilt_from_what_the_engines_hold(world: World) -> None:
    messages, _ = world.grown("flushed")
    with redis.Redis(port=world.deployment.valkey_port) as store:
        store.flushall()
    world.reuses_within(SOON, "flushed", [*messages, user("And now?")])


def test_without_the_store_turns_are_answered_and_with_an_empty_one_reuse_again(world: World) -> None:
    messages, _ = world.grown("restart-store")
    world.deployment.stop_valkey()
    assert next_turn(world, "restart-store", messages).reused == 0
    world.deployment.start_valkey()
    world.reuses_within(SOON, "restart-store", [*messages, user("And now?")])
