"""Real engines, started once for the whole session: P and D with the connector, and one plain vLLM to compare with."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from kvtide_bench.local import Deployment, EngineSpec, LocalSettings
from tests.e2e.proxy import Proxy
from tests.e2e.world import OPERATOR, PREFILL_LEASE, STRANGER, TICKET, World

HERE = Path(__file__).parent
TEMPLATE = ("--chat-template", str(HERE / "chat_template.jinja"))
CONTEXT = 4096
DECODE_BLOCKS = 256
PREFILL_CONTEXT, PREFILL_BLOCKS = 2048, 66
"""One request overwrites all but a block of P's pool."""


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    run_dir, gate = tmp_path_factory.mktemp("deployment"), tmp_path_factory.mktemp("gate")
    with contextlib.ExitStack() as stack:
        proxies = _started(stack), _started(stack)
        settings = _settings(run_dir, gate, *proxies)
        deployment = Deployment(settings)
        for name, proxy in zip(("prefill-0", "decode-0"), proxies, strict=True):
            proxy.target = deployment.engines[name].url
        stack.enter_context(deployment)
        http = stack.enter_context(httpx2.Client(timeout=120))
        yield World(deployment, http, *proxies, gate, settings.shared_key_file)


def _started(stack: contextlib.ExitStack) -> Proxy:
    proxy = Proxy()
    proxy.start()
    stack.callback(proxy.stop)
    return proxy


def _settings(run_dir: Path, gate: Path, to_prefill: Proxy, to_decode: Proxy) -> LocalSettings:
    keys, operator = run_dir / "keys.json", run_dir / "operator.key"
    rows = [
        {"key": OPERATOR, "tenant": "harbour", "role": "operator"},
        {"key": STRANGER, "tenant": "island"},
    ]
    keys.write_text(json.dumps({"keys": rows}))
    operator.write_text(OPERATOR)
    # The wait for a lease that was just reported is generous, so that a busy machine changes no plan.
    services = ("--api-keys-file", str(keys), "--idle-ttl", "120", "--plan-await", "1")
    gateway = ("--api-keys-file", str(keys), "--service-api-key", OPERATOR, "--plan-timeout", "3")
    return LocalSettings(
        run_dir,
        _engines(gate, operator, to_prefill, to_decode),
        dtype="float32",
        max_model_len=CONTEXT,
        gateway_args=("--force-strategy", "PREFILL_REUSE", *gateway),
        service_args=services,
        services_api_key=OPERATOR,
    )


def _engines(gate: Path, operator: Path, to_prefill: Proxy, to_decode: Proxy) -> tuple[EngineSpec, ...]:
    connector = {
        "kvtide_api_key_file": str(operator),
        "kvtide_ticket_duration": TICKET,
        "kv_lease_duration": round(PREFILL_LEASE),
    }
    small = ("--max-model-len", str(PREFILL_CONTEXT), "--num-gpu-blocks-override", str(PREFILL_BLOCKS))
    prefill = EngineSpec(
        "prefill-0",
        "prefill",
        ("--no-enable-prefix-caching", *small, *TEMPLATE),
        {**connector, "kvtide_http_url": to_prefill.url, "e2e_gate_dir": str(gate)},
        {"PYTHONPATH": str(HERE)},
        kv_space_gib=1,
        module="gated_connector",
    )
    decode = EngineSpec(
        "decode-0",
        "decode",
        ("--num-gpu-blocks-override", str(DECODE_BLOCKS), *TEMPLATE),
        {**connector, "kvtide_http_url": to_decode.url},
        {"VLLM_SERVER_DEV_MODE": "1"},
        kv_space_gib=1,
    )
    return prefill, decode, EngineSpec("plain", "plain", TEMPLATE, kv_space_gib=1)
