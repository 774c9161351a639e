"""What a measurement was made on."""

import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

_VERSIONS = "import sys; from importlib.metadata import version; print(*(version(n) for n in sys.argv[1:]), sep='\\n')"


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name and the number of cores that this process may use."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The faster of bfloat16 and float32: without instructions of its own bfloat16 is several times slower on a CPU."""
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return "bfloat16" if flags & {"amx_bf16", "avx512_bf16", "bf16"} else "float32"


def memory_gib() -> float:
    """The machine's memory."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def versions(python: Path, distributions: Sequence[str]) -> dict[str, str]:
    """Versions of distributions in another environment. Raises CalledProcessError."""
    command = [str(python), "-c", _VERSIONS, *distributions]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(zip(distributions, out.split(), strict=True))
