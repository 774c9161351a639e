from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtide_bench.conversation import Turn
from kvtide_bench.local import Process

MakeTurn = Callable[..., Turn]


@pytest.fixture
def turn() -> MakeTurn:
    plain = Turn(
        number=1,
        prompt_tokens=700,
        strategy="PREFILL_REUSE",
        reason="forced",
        reused_tokens=640,
        read_tokens=640,
        ttft=0.5,
        prefill_ttft=0.3,
        decode_ttft=0.195,
        transfer=0.05,
        asked=0.004,
        answer="a",
    )
    return lambda **changes: replace(plain, **changes)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Makes processes that run a piece of Python; none outlives the test."""
    made: list[Process] = []

    def make(code: str, **env: str) -> Process:
        made.append(Process(f"p{len(made)}", ["python3", "-u", "-c", code], env, tmp_path / f"p{len(made)}.log"))
        return made[-1]

    yield make
    for each in made:
        each.kill()
