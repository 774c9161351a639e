"""What both halves of the Redis store share."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from redis.exceptions import RedisError

from kvtide_services.errors import StoreUnavailable

P = ParamSpec("P")
T = TypeVar("T")


class _Timed(Protocol):
    _seconds: float


def guarded(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Bounds a method by its object's ``_seconds`` as a whole and makes every error of Redis a StoreUnavailable."""

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            async with asyncio.timeout(cast(_Timed, args[0])._seconds):
                return await method(*args, **kwargs)
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreUnavailable from error

    return call


def milliseconds(span: timedelta) -> int:
    """At least 1: Redis refuses 0 as a TTL."""
    return max(1, int(span.total_seconds() * 1000))
