"""What one client can make of another's conversation: nothing."""

from typing import Any

import pytest

from kvtide import directive as directives
from tests.e2e.world import OPERATOR, STRANGER, World, reusable, user

pytestmark = pytest.mark.engine
FORGED: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": True,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "forged",
    "remote_request_id": "forged",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "tp_size": 1,
    "kvtide": {"directive": "Zm9yZ2Vk", "mac": ""},
}


def test_another_tenants_conversation_id_finds_nothing(world: World) -> None:
    messages, last = world.grown("shared-name")
    asked = [*messages, user("And now?")]
    strange = world.ask_right("shared-name", asked, key=STRANGER)
    assert (strange.strategy, strange.reused) == ("PREFILL_FRESH", 0)
    own = world.ask_right("shared-name", asked, key=OPERATOR)
    assert own.reused == reusable(own.prompt, last) > 0
    again = world.ask_right("shared-name", [*asked[:-1], user("Whose is it?")], key=STRANGER)
    assert again.reused == reusable(again.prompt, strange), "its own turn, by now"


def test_a_client_may_not_force_a_strategy(world: World) -> None:
    headers = {"authorization": f"Bearer {STRANGER}", "x-kvtide-strategy": "DECODE_ONLY"}
    assert world.post(world.deployment.url, world.body([user("Hello")]), headers).status_code == 403


@pytest.mark.parametrize("place", ["body", "vllm_xargs"])
def test_transfer_params_of_a_client_never_reach_an_engine(world: World, place: str) -> None:
    messages, _ = world.grown(f"forged-{place}")
    asked = [*messages, user("And now?")]
    forged: dict[str, Any] = {"kv_transfer_params": FORGED}
    fields = forged if place == "body" else {"vllm_xargs": {**forged, "kvtide": "forged"}}
    world.to_prefill.seen.clear()
    world.to_decode.seen.clear()
    answer = world.ask(f"thief-{place}", asked, **fields)
    world.check(answer, asked)
    assert answer.reused == 0
    for body in (*seen_once(world.to_prefill.seen), *seen_once(world.to_decode.seen)):
        params = body["kv_transfer_params"]
        assert "kv_transfer_params" not in body.get("vllm_xargs", {})
        assert params["kvtide"] != FORGED["kvtide"]
        signed = directives.decode(params["kvtide"], world.shared_key())
        assert (signed.tenant, signed.session_id) == ("harbour", f"thief-{place}")
        for name in ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_port"):
            assert params.get(name) != FORGED[name]


def seen_once(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert len(bodies) == 1
    return bodies
