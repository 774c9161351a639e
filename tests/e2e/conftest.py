"""Real engines, started once for the whole session: P and D with the connector, and one plain vLLM to compare with."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kvtide_bench.local import Deployment, EngineSpec, LocalSettings

SERVED = "smollm2"
Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    """What came back, and how the gateway says it ran."""

    text: str
    prompt_tokens: int
    strategy: str
    reused: int
    reason: str


class World:
    """The deployment, and the plain engine that answers are compared with."""

    def __init__(self, deployment: Deployment, http: httpx2.Client) -> None:
        self.deployment = deployment
        self.http = http

    def post(self, url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx2.Response:
        return self.http.post(f"{url}/v1/chat/completions", json=body, headers=headers or {})

    def body(self, messages: list[Message], tokens: int = 12) -> dict[str, Any]:
        return {"model": SERVED, "messages": messages, "max_tokens": tokens, "temperature": 0}

    def ask(self, session: str, messages: list[Message], tokens: int = 12, **fields: Any) -> Answer:
        body = self.body(messages, tokens) | {"conversation_id": session} | fields
        response = self.post(self.deployment.url, body)
        assert response.status_code == 200, response.text
        answer = response.json()
        return Answer(
            text=answer["choices"][0]["message"]["content"],
            prompt_tokens=answer["usage"]["prompt_tokens"],
            strategy=response.headers["x-kvtide-strategy"],
            reused=int(response.headers["x-kvtide-reused-tokens"]),
            reason=response.headers["x-kvtide-reason"],
        )

    def plain(self, messages: list[Message], tokens: int = 12) -> str:
        response = self.post(self.deployment.engines["plain"].url, self.body(messages, tokens))
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["message"]["content"]
        return text


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    engines = (
        EngineSpec("prefill-0", "prefill", ("--no-enable-prefix-caching",), kv_space_gib=1),
        EngineSpec("decode-0", "decode", kv_space_gib=1),
        EngineSpec("plain", "plain", kv_space_gib=1),
    )
    run_dir: Path = tmp_path_factory.mktemp("deployment")
    settings = LocalSettings(
        run_dir, engines, dtype="float32", max_model_len=4096, gateway_args=("--force-strategy", "PREFILL_REUSE")
    )
    with Deployment(settings) as deployment, httpx2.Client(timeout=300) as http:
        yield World(deployment, http)
