"""Settings are checked once, at start, each and against each other."""

from datetime import timedelta
from typing import Any

import pytest
from click.testing import CliRunner

from kvtide.lease.v1 import directive_pb2
from kvtide_services.cli import serve
from kvtide_services.config import LeaseSettings, RoutingSettings, ServeSettings, SessionSettings


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"session_ttl": seconds(5)}, "between session_ttl_min and session_ttl_max"),
        ({"session_ttl_max": seconds(100)}, "between session_ttl_min and session_ttl_max"),
        ({"idle_ttl": seconds(3601)}, "idle_ttl must not exceed"),
        ({"sweep_interval": seconds(1)}, "sweep_interval must be below 1"),
        ({"store_timeout": seconds(3)}, "store_timeout must be below the time after which"),
        ({"engines_max_age": seconds(3)}, "engines_max_age must be below the time after which"),
        ({"engines_keep": seconds(0.1)}, "engines_keep must not be below"),
        ({"plan_await": seconds(-1)}, "must not be negative"),
        ({"grace": seconds(-1)}, "must not be negative"),
        ({"beat_interval": seconds(0)}, "beat_interval must be above 0"),
        ({"watch_history": 0}, "watch_history must be above 0"),
        ({"recompute_threshold": -1}, "recompute_threshold must not be negative"),
        ({"force_strategy": "NONSENSE"}, "force_strategy must be one of"),
        ({"port": 65536}, "port must lie between"),
        ({"metrics_port": -1}, "metrics_port must lie between"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServeSettings(**wrong)


def test_each_service_has_its_own_port() -> None:
    kinds = (ServeSettings, SessionSettings, LeaseSettings, RoutingSettings)
    assert [kind().port for kind in kinds] == [7100, 7101, 7102, 7103]
    assert SessionSettings().lease_address == "127.0.0.1:7102"


def test_a_forced_strategy_is_known_by_its_name() -> None:
    assert ServeSettings(force_strategy="DECODE_ONLY").forced == directive_pb2.STRATEGY_DECODE_ONLY
    assert ServeSettings().forced == directive_pb2.STRATEGY_UNSPECIFIED


@pytest.mark.parametrize("name", ["session", "lease", "routing", "all"])
def test_help_says_every_setting(name: str) -> None:
    text = CliRunner().invoke(serve, [name, "--help"]).output
    for field in ServeSettings.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in text
        assert f"KVTIDE_{field.upper()}" in text.replace("\n", "").replace(" ", "")


def test_a_wrong_setting_is_a_usage_error() -> None:
    result = CliRunner().invoke(serve, ["all", "--session-ttl", "5"])
    assert (result.exit_code, "session_ttl must lie" in result.output) == (2, True)
