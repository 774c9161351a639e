"""The connector's clock: monotonic, counts suspend, comparable between the processes of one host only."""

import time
from collections.abc import Callable
from pathlib import Path

Clock = Callable[[], int]
"""Nanoseconds since an arbitrary origin."""

SECOND = 1_000_000_000


def boottime_ns() -> int:
    """CLOCK_BOOTTIME in nanoseconds; unlike CLOCK_MONOTONIC it goes on while the host is suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def host_boot_id() -> str:
    """Identifies one boot of this host: readings of :func:`boottime_ns` compare only under the same id."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def reader_deadline(asked_at: int, duration: int, margin: int) -> int:
    """When a reader must stop using what it was promised for ``duration`` (all in nanoseconds).

    Counted from before the ask, less 1 % for clock rates and ``margin``, so that it ends before the holder's own count.
    """
    return asked_at + duration - duration // 100 - margin
