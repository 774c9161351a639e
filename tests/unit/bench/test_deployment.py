import itertools
import json
from pathlib import Path

import pytest

from kvtide_bench.config import DemoSettings, UpSettings
from kvtide_bench.local import Deployment, EngineSpec, LocalSettings, NotReady
from kvtide_bench.local.engines import Engine, EnginePlace


@pytest.fixture
def place(tmp_path: Path) -> EnginePlace:
    return EnginePlace(Path("/python"), Path("/model"), "float32", 32, 4096, "127.0.0.1:7100", Path("/key"), tmp_path)


def options(engine: Engine) -> dict[str, str]:
    argv = engine.process.argv
    return {a: b for a, b in itertools.pairwise(argv) if a.startswith("--")}


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_an_engine_gets_our_connector(role: str, kv_role: str, place: EnginePlace) -> None:
    engine = Engine(EngineSpec("e", role, ("--extra",), {"kvtide_read_timeout": 2.0}), place)
    transfer = json.loads(options(engine)["--kv-transfer-config"])
    assert transfer["kv_role"] == kv_role
    assert transfer["kv_connector_extra_config"] == {
        "bidirectional_kv_xfer": True,
        "kvtide_lease_address": "127.0.0.1:7100",
        "kvtide_engine_name": "e",
        "kvtide_http_url": engine.url,
        "kvtide_shared_key_file": "/key",
        "kvtide_read_timeout": 2.0,
    }
    assert "--extra" in engine.process.argv


def test_a_plain_engine_has_no_connector(place: EnginePlace) -> None:
    assert "--kv-transfer-config" not in options(Engine(EngineSpec("plain", "plain"), place))


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="role must be"):
        EngineSpec("e", "both")


def test_a_missing_installation_is_said_before_anything_starts(tmp_path: Path) -> None:
    settings = LocalSettings(tmp_path / "run", engine_python=tmp_path / "python")
    with pytest.raises(NotReady, match="make install"), Deployment(settings):
        pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kind", "values"),
    [(DemoSettings, {"dtype": "int8"}), (DemoSettings, {"turns": 1}), (UpSettings, {"dtype": "fp8"})],
)
def test_bad_settings_are_refused(kind: type[DemoSettings | UpSettings], values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        kind(**values)  # type: ignore[arg-type]  # wrong on purpose


def test_the_cache_directory_holds_model_results_and_logs() -> None:
    demo, up = DemoSettings(cache_dir="/c"), UpSettings(cache_dir="/c")
    assert demo.directory == Path("/c/demo")
    assert up.directory == Path("/c/run")
    assert demo.model == up.model == Path("/c/models/SmolLM2-135M-Instruct")
