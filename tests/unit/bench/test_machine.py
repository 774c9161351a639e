import sys
from pathlib import Path

from kvtide_bench.machine import cpu, dtype, memory_gib, versions


def test_the_processor_is_named(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Some CPU\nprocessor : 1\nmodel name\t: Some CPU\n")
    assert cpu(tmp_path / "cpuinfo").startswith("Some CPU, ")


def test_a_machine_without_cpuinfo_has_a_name_too(tmp_path: Path) -> None:
    assert cpu(tmp_path / "none").endswith(" cores")


def test_bfloat16_is_used_where_the_processor_has_instructions_for_it(tmp_path: Path) -> None:
    flags = tmp_path / "cpuinfo"
    flags.write_text("flags : fpu avx2 avx512_bf16\n")
    assert dtype(flags) == "bfloat16"
    flags.write_text("flags : fpu avx2\n")
    assert dtype(flags) == "float32"


def test_memory_is_in_gib() -> None:
    assert 0.1 < memory_gib() < 100_000


def test_versions_come_from_the_other_environment() -> None:
    found = versions(Path(sys.executable), ("click", "grpcio"))
    assert list(found) == ["click", "grpcio"]
    assert all(found.values())
