"""Reports the outcome of every call of an interface, so that the business code behind it counts nothing."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kvtide_services.errors import KvtideError

T = TypeVar("T")
OnResult = Callable[[str, Any], None]
OnError = Callable[[str, KvtideError], None]


class _Observed:
    def __init__(self, target: object, on_result: OnResult, on_error: OnError) -> None:
        self._target = target
        self._on_result = on_result
        self._on_error = on_error

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        @functools.wraps(method)
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                result = await method(*args, **kwargs)
            except KvtideError as error:
                self._on_error(name, error)
                raise
            self._on_result(name, result)
            return result

        setattr(self, name, call)
        return call


def observed(target: T, on_result: OnResult, on_error: OnError) -> T:
    """The same interface, whose methods must all be coroutines; told are the method's name and its result or error."""
    return cast(T, _Observed(target, on_result, on_error))
