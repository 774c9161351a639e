"""Parts on their own: settings, keys, errors, memory, plans."""

import asyncio
import json
from datetime import timedelta
from typing import Any

import pytest
from click.testing import CliRunner

from kvtide.keys import Caller
from kvtide_gateway import errors
from kvtide_gateway.auth import KeyRing
from kvtide_gateway.cli import gateway
from kvtide_gateway.config import GatewaySettings
from kvtide_gateway.known import KnownEngines
from kvtide_gateway.plan import Lease, Plan, PlannedEngine
from kvtide_gateway.strategy import Strategy
from kvtide_gateway.turns import EndedTurn, RecentTurns, TurnReporter

D = PlannedEngine("d1", "boot", "http://d1")
P = PlannedEngine("p1", "boot", "http://p1")
LEASE = Lease("l1", 1, "d1", "boot")


def _all_errors(kind: type[errors.GatewayError] = errors.GatewayError) -> list[type[errors.GatewayError]]:
    return [each for sub in kind.__subclasses__() for each in (sub, *_all_errors(sub))]


def test_every_error_has_a_status_and_a_body() -> None:
    assert set(errors.TABLE) == set(_all_errors())
    for kind, (status, _, code) in errors.TABLE.items():
        got, body = errors.render(kind("why", param="where"))
        assert (got, 400 <= got < 600) == (status, True)
        assert json.loads(body)["error"] | {"type": ""} == {
            "message": "why",
            "type": "",
            "param": "where",
            "code": code,
        }


@pytest.mark.parametrize(
    "wrong",
    [
        {"retention": "maybe"},
        {"force_strategy": "MAGIC"},
        {"max_body_bytes": 0},
        {"max_attempts": 0},
        {"plan_timeout": timedelta(0)},
        {"first_byte_timeout": timedelta(seconds=2), "idle_timeout": timedelta(seconds=1)},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GatewaySettings(**wrong)


def test_every_setting_is_an_option_with_help() -> None:
    result = CliRunner().invoke(gateway, ["--help"], terminal_width=200)
    assert result.exit_code == 0
    for name in GatewaySettings.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in result.output


@pytest.mark.parametrize("option", ["--api-keys-file", "--shared-key-file"])
def test_a_missing_file_is_said_at_start(option: str, tmp_path: Any) -> None:
    result = CliRunner().invoke(gateway, [option, str(tmp_path / "missing")])
    assert result.exit_code == 1
    assert "missing" in result.output


def test_keys_of_a_file(tmp_path: Any) -> None:
    path = tmp_path / "keys"
    path.write_text('{"keys": [{"key": "kü", "tenant": "a"}, {"key": "b", "tenant": "b", "role": "operator"}]}')
    ring = KeyRing.from_file(str(path))
    assert ring.caller("bearer kü") == Caller("a", operator=False)
    assert ring.caller("Bearer b") == Caller("b", operator=True)
    assert KeyRing.from_file("").caller("") == Caller("default", operator=True)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"keys": [5]}',
        '{"keys": [{"key": "a"}]}',
        '{"keys": [{"key": "", "tenant": "a"}]}',
        '{"keys": [{"key": 5, "tenant": "a"}]}',
        '{"keys": [{"key": "a", "tenant": ""}]}',
        '{"keys": [{"key": "a", "tenant": "ü"}]}',
        '{"keys": [{"key": "a", "tenant": "a", "role": "king"}]}',
    ],
)
def test_a_key_file_that_is_none_is_refused(text: str, tmp_path: Any) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ValueError):
        KeyRing.from_file(str(tmp_path / "keys"))


@pytest.mark.parametrize(
    ("prefill", "lease", "limit", "strategy"),
    [
        (P, LEASE, Strategy.DECODE_DIRECT, Strategy.DECODE_DIRECT),
        (P, LEASE, Strategy.PREFILL_REUSE, Strategy.PREFILL_REUSE),
        (P, None, Strategy.DECODE_DIRECT, Strategy.PREFILL_FRESH),
        (None, LEASE, Strategy.PREFILL_REUSE, Strategy.DECODE_ONLY),
        (None, None, Strategy.DECODE_DIRECT, Strategy.DECODE_ONLY),
        (P, LEASE, Strategy.DECODE_ONLY, Strategy.DECODE_ONLY),
    ],
)
def test_a_plan_goes_down_to_what_its_engines_can_do(
    prefill: PlannedEngine | None, lease: Lease | None, limit: Strategy, strategy: Strategy
) -> None:
    plan = Plan(Strategy.DECODE_DIRECT, "why", D, prefill, lease)
    assert plan.at_most(limit).strategy is strategy


def test_a_plan_never_goes_up() -> None:
    plan = Plan(Strategy.DECODE_ONLY, "why", D, P, LEASE)
    assert plan.at_most(Strategy.DECODE_DIRECT) == plan


def test_known_engines_forget_the_oldest_and_offer_the_latest() -> None:
    known = KnownEngines(2)
    for number in (1, 2, 3):
        known.learn("m", PlannedEngine(f"d{number}", "boot", ""))
    latest, before = known.find("m"), known.find("m", {"d3"})
    assert latest is not None
    assert before is not None
    assert (latest.name, before.name) == ("d3", "d2")
    assert known.find("m", {"d3", "d2"}) is None
    assert known.find("other") is None
    assert known.any({"d3"}) == before
    assert known.models() == ["m"]


class Clock:
    """Turned by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_turn_is_awaited_for_a_while_and_counted_on_for_longer() -> None:
    clock = Clock()
    recent = RecentTurns(limit=10, window=1.0, clock=clock)
    recent.ended("a", "s", 7)
    recent.ended("a", "s", 6)
    assert (recent.last("a", "s"), recent.unreported("a", "s")) == (7, 7)
    clock.now += 1.5
    assert (recent.last("a", "s"), recent.unreported("a", "s")) == (7, 0)
    assert recent.last("b", "s") == 0


def test_remembered_sessions_are_bounded() -> None:
    recent = RecentTurns(limit=2, window=1.0, clock=Clock())
    for session in ("s1", "s2", "s3"):
        recent.ended("a", session, 1)
    assert [recent.last("a", session) for session in ("s1", "s2", "s3")] == [0, 1, 1]


async def test_reports_under_way_are_bounded_and_end_before_closing() -> None:
    gate = asyncio.Event()
    counts: list[str] = []

    async def send(turn: EndedTurn) -> bool:
        await gate.wait()
        return turn.turn == 1

    reporter = TurnReporter(send, limit=2, count=counts.append)
    for number in (1, 2, 3):
        reporter.report(EndedTurn("a", "s", number, "m", D))
    assert counts == ["dropped"]
    gate.set()
    await reporter.aclose()
    assert sorted(counts) == ["dropped", "failed", "ok"]
