"""NIXL's progress thread, slowed where it would spin.

NIXL's Python API starts its progress thread with a poll pause of 0, which keeps one core busy in each engine from the
first connection on. The native configuration has the field; the Python constructor does not pass it. So for the time of
vLLM's own constructor call the native module is seen through a stand-in that fills it in. No installed file is touched.
"""

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any


class _DelayedBinding:
    """Stands in for NIXL's native module; agents made through it pause between polls."""

    def __init__(self, native: ModuleType, delay_us: int) -> None:
        self._native = native
        self._delay_us = delay_us

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def nixlAgent(self, name: str, config: Any) -> Any:
        config.pthrDelay = self._delay_us
        return self._native.nixlAgent(name, config)


def _api_module() -> Any:
    wrapper = importlib.import_module("vllm.distributed.nixl_utils").NixlWrapper
    return importlib.import_module(wrapper.__module__)


@contextlib.contextmanager
def progress_thread_delay(delay_us: int) -> Iterator[None]:
    """NIXL agents made inside poll every ``delay_us`` microseconds; 0 leaves NIXL as it is."""
    if delay_us <= 0:
        yield
        return
    api = _api_module()
    native = api.nixlBind
    api.nixlBind = _DelayedBinding(native, delay_us)
    try:
        yield
    finally:
        api.nixlBind = native
