"""Callers, checks and pages of a call."""

import base64
import binascii
import contextvars
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvtide.keys import Caller
from kvtide_services.errors import Forbidden, InvalidField, InvalidToken

T = TypeVar("T")
MAX_PAGE, DEFAULT_PAGE = 1000, 100
CALLER: contextvars.ContextVar[Caller] = contextvars.ContextVar("caller")


def caller_of(context: Any) -> Caller:
    """Who makes this call; the interceptor has checked the key."""
    return CALLER.get()


def operator_of(context: Any) -> Caller:
    """The same, for calls that only operators may make. Raises Forbidden."""
    caller = CALLER.get()
    if not caller.operator:
        raise Forbidden(caller.tenant)
    return caller


def require(holds: bool, field: str, value: object, range: str) -> None:
    """Raises InvalidField unless ``holds``."""
    if not holds:
        raise InvalidField(field, value, range)


def page_size(asked: int) -> int:
    """0 means the default, more than the maximum is clamped. Raises InvalidField for a negative one."""
    require(asked >= 0, "page_size", asked, f"0 to {MAX_PAGE}")
    return min(asked or DEFAULT_PAGE, MAX_PAGE)


def page(rows: Sequence[T], key: Callable[[T], str], size: int, token: str) -> tuple[list[T], str]:
    """The rows (sorted by ``key``) behind a page token, and the next token, empty on the last page."""
    after = open_token(token)
    rest = [row for row in rows if key(row) > after] if token else list(rows)
    count = page_size(size)
    return rest[:count], seal_token(key(rest[count - 1])) if len(rest) > count else ""


def seal_token(key: str) -> str:
    """A page token that continues behind ``key``."""
    return base64.urlsafe_b64encode(b"k1" + key.encode()).decode()


def open_token(token: str) -> str:
    """The key in a page token. Raises InvalidToken."""
    if not token:
        return ""
    try:
        raw = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
        if raw[:2] != b"k1":
            raise ValueError(token)
        return raw[2:].decode()
    except (binascii.Error, ValueError) as error:
        raise InvalidToken("page_token") from error
