"""What tests on real engines do: ask through the gateway, ask the plain engine, compare, look at counters."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from kvtide.lease.v1 import lease_pb2
from kvtide_bench.local import Deployment
from kvtide_bench.local.engines import Engine
from kvtide_bench.scrape import Change, Reading, read
from tests.e2e.proxy import Proxy

SERVED = "smollm2"
BLOCK = 32
THRESHOLD = 64
"""The connector's and routing's recompute threshold, in tokens."""
TOKENS = 8
"""Tokens of an answer."""
NEAR_TIE = 0.01
TICKET = 4.0
"""Seconds of a D→P ticket here."""
PREFILL_LEASE = 10.0
"""Seconds for which P keeps its blocks for D here."""
OPERATOR, STRANGER = "operators-key", "strangers-key"
"""Keys of two tenants."""

Message = dict[str, str]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def question(topic: str, turn: int) -> Message:
    """About 90 tokens."""
    note = f"Note {turn} about {topic}: the water at the pier rises and falls, and the pilots write down the hour. "
    return user(note * 3 + "What does the note say?")


def long_question(number: int) -> Message:
    """About 600 tokens, from the first on like no other's."""
    return user(f"Ship {number}. " + f"Entry {number}: the water at the pier rises, the pilots write. " * 37 + "Why?")


@dataclass(frozen=True)
class Answer:
    """What came back, and how the gateway says it ran (nothing for the plain engine)."""

    text: str
    prompt: list[int]
    tokens: list[int]
    strategy: str = ""
    reused: int = 0
    reason: str = ""
    gaps: list[float] = field(default_factory=list)
    """The plain engine's: by how much the best token's logprob beat the second one's."""
    pieces: list[str] = field(default_factory=list)
    """The plain engine's: the text of each token."""

    @property
    def held(self) -> list[int]:
        """Tokens whose KV D has afterwards: never the last sampled one's."""
        return [*self.prompt, *self.tokens[:-1]]


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences share from the start."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def reusable(prompt: Sequence[int], *held: Answer) -> int:
    """Tokens of ``prompt`` in whole blocks that D has after these answers, never all; 0 below the threshold."""
    shared = max(min(common(answer.held, prompt), len(prompt) - 1) for answer in held)
    whole = shared // BLOCK * BLOCK
    return whole if whole >= THRESHOLD else 0


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.05)


def aside(call: Callable[[], Any]) -> "Future[Any]":
    """Calls it on a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class World:
    """The deployment, proxies before its engines, and the plain engine that answers are compared with."""

    def __init__(
        self,
        deployment: Deployment,
        http: httpx2.Client,
        to_prefill: Proxy,
        to_decode: Proxy,
        gate: Path,
        key_file: Path,
    ) -> None:
        self.deployment = deployment
        self.http = http
        self.to_prefill = to_prefill
        self.to_decode = to_decode
        self.gate = gate
        self.key_file = key_file
        self._right: dict[str, Answer] = {}
        self.ties: list[str] = []
        """Turns of the whole run that differ from the plain engine's answer at a near tie."""

    @property
    def prefill(self) -> Engine:
        return self.deployment.engines["prefill-0"]

    @property
    def decode(self) -> Engine:
        return self.deployment.engines["decode-0"]

    @property
    def plain(self) -> Engine:
        return self.deployment.engines["plain"]

    # Asking.

    def post(
        self, url: str, body: dict[str, Any], headers: dict[str, str] | None = None, path: str = "/v1/chat/completions"
    ) -> httpx2.Response:
        return self.http.post(f"{url}{path}", json=body, headers=headers or {})

    def body(self, messages: list[Message], **fields: Any) -> dict[str, Any]:
        own = {"model": SERVED, "messages": messages, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
        return own | fields

    def ask(
        self,
        session: str,
        messages: list[Message],
        key: str = OPERATOR,
        headers: dict[str, str] | None = None,
        **fields: Any,
    ) -> Answer:
        """The gateway's answer."""
        body = self.body(messages, **fields) | {"conversation_id": session}
        response = self.post(self.deployment.url, body, {"authorization": f"Bearer {key}"} | (headers or {}))
        assert response.status_code == 200, response.text
        answer, facts = response.json(), response.headers
        return Answer(
            text=answer["choices"][0]["message"]["content"],
            prompt=answer["prompt_token_ids"],
            tokens=answer["choices"][0]["token_ids"],
            strategy=facts["x-kvtide-strategy"],
            reused=int(facts["x-kvtide-reused-tokens"]),
            reason=facts["x-kvtide-reason"],
        )

    def right(self, messages: list[Message], **fields: Any) -> Answer:
        """The plain engine's answer; it is asked once for each request."""
        body = self.body(messages, logprobs=True, top_logprobs=2, **fields)
        name = json.dumps(body, sort_keys=True)
        if name not in self._right:
            self._right[name] = self._plain(body)
        return self._right[name]

    def _plain(self, body: dict[str, Any]) -> Answer:
        response = self.post(self.plain.url, body)
        assert response.status_code == 200, response.text
        answer = response.json()
        choice = answer["choices"][0]
        places = choice["logprobs"]["content"]
        tops = [place["top_logprobs"] for place in places]
        return Answer(
            text=choice["message"]["content"],
            prompt=answer["prompt_token_ids"],
            tokens=choice["token_ids"],
            gaps=[top[0]["logprob"] - top[1]["logprob"] for top in tops],
            pieces=[place["token"] for place in places],
        )

    def tokens(self, messages: list[Message], **fields: Any) -> list[int]:
        """A chat as the plain engine tokenises it, ready to be answered."""
        response = self.post(self.plain.url, {"model": SERVED, "messages": messages, **fields}, path="/tokenize")
        assert response.status_code == 200, response.text
        ids: list[int] = response.json()["tokens"]
        return ids

    def check(self, answer: Answer, messages: list[Message], **fields: Any) -> None:
        """The answer is the plain engine's, but for one near tie in a whole run."""
        right = self.right(messages, **fields)
        assert answer.prompt == right.prompt
        if answer.tokens == right.tokens:
            assert answer.text == right.text
            return
        place = common(answer.tokens, right.tokens)
        differs = f"{answer.text!r} instead of {right.text!r} after {len(right.prompt)} tokens ({answer.reason})"
        assert place < min(len(answer.tokens), len(right.tokens)), differs
        assert right.gaps[place] < NEAR_TIE, f"{differs}: gap {right.gaps[place]:.4f} at token {place}"
        self.ties.append(differs)
        assert len(self.ties) <= 1, self.ties

    def ask_right(self, session: str, messages: list[Message], **fields: Any) -> Answer:
        """The gateway's answer, checked."""
        answer = self.ask(session, messages, **fields)
        self.check(answer, messages, **{k: v for k, v in fields.items() if k not in ("key", "headers")})
        return answer

    def grown(self, session: str, turns: int = 2) -> tuple[list[Message], Answer]:
        """A conversation, and the answer to its last turn, which it ends with."""
        messages: list[Message] = []
        for turn in range(1, turns + 1):
            messages.append(question(session, turn))
            answer = self.ask(session, messages)
            messages.append(said(answer.text))
        return messages, answer

    def reuses_within(self, seconds: float, session: str, messages: list[Message]) -> Answer:
        """Asks the same until a turn reuses what D holds; every answer must be right."""
        deadline = time.monotonic() + seconds
        while True:
            answer = self.ask(session, messages)
            late = time.monotonic() > deadline
            self.check(answer, messages)
            if answer.strategy == "PREFILL_REUSE" and answer.reused:
                return answer
            assert not late, f"no reuse within {seconds:.0f} s: {answer.strategy}, {answer.reason}"

    def fill(self, engine: Engine, tokens: int) -> None:
        """A prompt of so many tokens straight to an engine, like no other."""
        prompt = [1000 + i * 31 % 40000 for i in range(tokens)]
        body = {"model": SERVED, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        response = self.post(engine.url, body, path="/v1/completions")
        assert response.status_code == 200, response.text

    # Looking.

    def shared_key(self) -> bytes:
        """What the gateway signs directives with."""
        return self.key_file.read_bytes().strip()

    def beat(self, engine: Engine) -> lease_pb2.Beat | None:
        """An engine's next word on its own pool; None when it does not come."""
        first = self._beat(engine)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            now = self._beat(engine)
            if now is not None and (first is None or now.clock_stamp != first.clock_stamp):
                return now
            time.sleep(0.05)
        return None

    def _beat(self, engine: Engine) -> lease_pb2.Beat | None:
        statuses = self.deployment.statuses()
        return next((status.beat for status in statuses if status.engine.name == engine.spec.name), None)

    def free_blocks(self, engine: Engine) -> int:
        beat = self.beat(engine)
        assert beat is not None, f"{engine.spec.name} is not attached"
        return beat.free_blocks

    def held_tokens(self, engine: Engine) -> int:
        beat = self.beat(engine)
        assert beat is not None, f"{engine.spec.name} is not attached"
        return beat.held_tokens

    def empty_decode(self) -> None:
        """Ends every hold of D."""
        response = self.http.post(f"{self.decode.url}/reset_prefix_cache")
        assert response.json() == {"success": True}
        wait_until(lambda: self.held_tokens(self.decode) == 0, 5, "D holds nothing")


class Counters:
    """An engine's counters since a moment; vLLM publishes them a little after the answer."""

    def __init__(self, engine: Engine) -> None:
        self._url = engine.url
        self._before = read(engine.url)

    def change(self) -> Change:
        return Change(self._before, self._now())

    def of(self, name: str) -> float:
        return self.change().of(name)

    def wait(self, name: str, least: float = 1, seconds: float = 5) -> float:
        """The change of a counter, once it is at least ``least``."""
        wait_until(lambda: self.of(name) >= least, seconds, f"{name} rises by {least:.0f}")
        return self.of(name)

    def _now(self) -> Reading:
        return read(self._url)
